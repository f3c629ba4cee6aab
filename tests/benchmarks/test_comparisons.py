"""benchmarks/chunk_against_recurrent.py and block_diagonal.py, run on the CPU: which calls, and what is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = ["--device", "cpu", "--backend", "torch", "--rep-ms", "1"]
LONG = ["--lengths", "8", "32", "--tokens", "64", "--width", "16", "--head-dims", "4", "8"]
NARROW = ["--batch", "1", "--seq-len", "9", "--num-heads", "4", "--key-dim", "16", "--value-dim", "8"]


def test_both_forms_are_timed_for_the_same_tokens(
    load_script: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = load_script("chunk_against_recurrent"), tmp_path / "c.json"
    assert script.main([*HERE, *LONG, "--ops", "deltaproduct", "gla", "--out", str(out)]) == 0
    records = json.loads(out.read_text())
    assert len(records) == 2 * 2 * 2 * 2
    assert {r["batch"] * r["seq_len"] for r in records} == {64}
    assert {r["num_heads"] * r["head_dim"] for r in records} == {16}
    assert {(r["op"], r["count"]) for r in records} == {("deltaproduct", 2), ("gla", 1)}
    for record in records:
        assert record["forward_ms"] > 0 and record["forward_backward_ms"] is None and record["form"] in script.FORMS
        assert record["gpu"] == "none" and record["dtype"] == "bfloat16"
    printed = capsys.readouterr().out
    assert "DeltaProduct        B8 T8 H4 D4" in printed and "0 failed, 0 not run" in printed
    [row] = [line for line in printed.splitlines() if line.startswith("GLA                       32")]
    assert all(float(ratio) > 0 for ratio in row.split()[2:])


def test_a_default_run_is_that_of_the_figure(load_script: Callable[[str], Any]) -> None:
    script = load_script("chunk_against_recurrent")
    tasks = script.tasks_of(script._parse([]))
    assert len(tasks) == 6 * 3 * 7 * 2 and {task.sizes.batch * task.sizes.seq_len for task in tasks} == {32768}
    assert {task.sizes.seq_len for task in tasks} == {512, 1024, 2048, 4096, 8192, 16384, 32768}
    assert {task.sizes.key_dim for task in tasks} == {64, 128, 256}


def test_every_layout_has_the_same_state(
    load_script: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = load_script("block_diagonal"), tmp_path / "b.json"
    assert script.main([*HERE, *NARROW, "--out", str(out)]) == 0
    records = json.loads(out.read_text())
    assert {r["num_value_heads"] * r["key_dim"] * r["value_dim"] for r in records} == {4 * 16 * 8}
    assert [(r["op"], r["num_heads"], r["key_dim"], r["blocks"]) for r in records[:6]] == [
        ("deltanet", 4, 16, 1),
        ("deltanet_blocks", 4, 16, 2),
        ("deltanet", 8, 8, 1),
        ("deltanet_blocks", 4, 16, 4),
        ("deltanet", 16, 4, 1),
        ("deltanet_blocks", 1, 64, 8),
    ]
    assert len(records) == 18 and all(r["forward_ms"] > 0 and r["forward_backward_ms"] > 0 for r in records)
    assert "KDA             1 heads of K 64 in 8 blocks of 8" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "sizes"), [("chunk_against_recurrent", LONG), ("block_diagonal", NARROW)])
def test_failures_and_a_lack_of_time_are_told(
    load_script: Callable[[str], Any], name: str, sizes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = load_script(name), tmp_path / "x.json"
    one = [*HERE, *sizes, "--ops", "deltanet", "--out", str(out)]
    assert script.main([*one, "--minutes", "0"]) == 2 and not out.exists()
    assert script.main([*one, "--backend", "triton"]) == 1
    assert "triton" in json.loads(out.read_text())[0]["failure"]
    assert "NotImplementedError" in capsys.readouterr().out
