"""benchmarks/speed.py and peer.py, run on the CPU: the records, the table, and what a failure costs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from statemix.benchmarks.ops import OPS, Sizes, names_of, random_operands

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ["--device", "cpu", "--backend", "torch", "--rep-ms", "1", "--shapes", "1x20x2x8", "2x9x1x8"]
SHAPES_TRIED = Sizes(1, 6, 2, 2, 8, 8)
FIELDS = (
    "op batch seq_len num_heads num_value_heads key_dim value_dim head_dim count blocks dtype backend "
    "forward_ms forward_backward_ms peak_mb first_call_s gpu versions"
).split()


@pytest.fixture
def script(load_script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRITON_CACHE_DIR", "as before")  # the first calls change it
    return load_script("speed")


def test_every_recurrence_and_shape_gets_a_record(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.json"
    assert script.main([*TINY, "--ops", "gla", "deltanet", "--out", str(out)]) == 0
    records = json.loads(out.read_text())
    assert [(r["op"], r["batch"], r["seq_len"]) for r in records] == [
        ("gla", 1, 20), ("gla", 2, 9), ("deltanet", 1, 20), ("deltanet", 2, 9)
    ]  # fmt: skip
    for record in records:
        assert record.keys() >= set(FIELDS)
        assert 0 < record["forward_ms"] < record["forward_backward_ms"]
        assert record["head_dim"] == 8 and record["dtype"] == "bfloat16" and record["backend"] == "torch"
    first = [r["first_call_s"] for r in records]
    assert first[0] is not None and first[2] is not None and first[1] is first[3] is None  # one shape each
    printed = capsys.readouterr().out
    assert "B1 T20 H2 D8, bfloat16, ms" in printed and "0 failed" in printed


def test_a_failure_costs_its_line(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = script.measure

    def fails_once(task: Any) -> Any:
        if task.op == "retnet" and task.sizes.batch == 2:
            raise RuntimeError("an illegal memory access")
        return measure(task)

    monkeypatch.setattr(script, "measure", fails_once)
    assert script.main([*TINY, "--ops", "retnet", "--no-first-call"]) == 1
    printed = capsys.readouterr().out
    assert "RetNet                    RuntimeError: an illegal memory access" in printed and "1 failed" in printed
    assert script.main([*TINY, "--ops", "retnet", "--no-first-call", "--backend", "triton"]) == 1
    assert "compiled 0 of 2 calls" in capsys.readouterr().out


def test_calls_that_compile_side_by_side_differ(script: Any) -> None:
    arguments = script._parse(["--family", "delta"])
    tasks = [
        script.TimedScan(op, sizes, "bfloat16", "cuda", "triton", False, 1)
        for op in arguments.ops
        for sizes in arguments.shapes
    ]
    order = script.mixed(tasks, arguments)
    assert set(order) == set(tasks)
    for first in range(0, len(order), len(arguments.ops)):
        neighbours = order[first : first + len(arguments.ops)]
        assert len({task.op for task in neighbours}) == len(arguments.ops)
        assert max(sum(task.sizes == sizes for task in neighbours) for sizes in arguments.shapes) <= 3


def test_floors_are_bytes_over_bandwidth(script: Any) -> None:
    found = script.with_floors({"floor_bytes": 268_435_456, "floor_forward_backward_bytes": 738_197_504}, 4244.0)
    assert found["floor_ms"] == pytest.approx(0.0633, abs=1e-4)  # as published for B8 T2048 H16 D128
    assert found["floor_forward_backward_ms"] == pytest.approx(0.1739, abs=1e-4)


def test_the_table_sets_the_peer_beside_ours(script: Any, load_script: Callable[[str], Any], capsys: Any) -> None:
    load_script("peer").print_earlier(["gla"])
    theirs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["forward_ms"], r["forward_backward_ms"]) for r in theirs] == [(0.706, 2.98), (2.008, 7.9)]
    assert all(r.keys() >= set(FIELDS) and "lifted for timing only" in r["note"] for r in theirs)
    ours = {**theirs[0], "backend": "triton", "forward_ms": 0.353, "forward_backward_ms": 1.0, "peak_mb": 12.0}
    [*_, row] = script.table([ours, *theirs]).splitlines()
    assert row.split() == ["GLA", "0.353", "-", "0.706", "2.00", "1.000", "-", "2.980", "2.98", "12", "-/-"]


def test_lines_of_an_earlier_run_of_the_peer_are_taken_over(
    script: Any, load_script: Callable[[str], Any], tmp_path: Path, capsys: Any
) -> None:
    load_script("peer").print_earlier(["gla", "kda"])
    (tmp_path / "peer.jsonl").write_text("a warning of some library\n" + capsys.readouterr().out)
    out, peers = tmp_path / "s.json", ["--peer-from", str(tmp_path / "peer.jsonl")]
    assert script.main([*TINY, "--ops", "gla", "--no-first-call", *peers, "--out", str(out)]) == 0
    assert [r["op"] for r in json.loads(out.read_text()) if r["backend"] == script.PEER_NAME] == ["gla", "gla"]


def test_published_recurrences_have_a_peer(load_script: Callable[[str], Any]) -> None:
    peer = load_script("peer")
    published = {op.name for op in OPS.values() if op.is_timed and op.blocks == 1}
    assert peer.EARLIER.keys() < peer.PEERS.keys() < published
    assert published - peer.PEERS.keys() == {"kda_product", "deltanet_projected", "gdn2", "rwkv7", "comba"}


def test_steps_lie_along_time_for_the_peer(load_script: Callable[[str], Any]) -> None:
    op = OPS["gated_deltaproduct"]
    x = random_operands(op, SHAPES_TRIED, dtype=torch.float32, device=torch.device("cpu"))
    (q, k, v, log_decay, beta, count), _ = load_script("peer").PEERS[op.name][2](x)
    assert q.shape == (1, 6, 2, 8) and k.shape == v.shape == (1, 12, 2, 8) and beta.shape == (1, 12, 2)
    assert log_decay.shape == (1, 6, 2) and count == 2


def test_the_rows_of_a_family_have_their_count_and_blocks_and_time_can_run_out(
    script: Any, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "s.json"
    one = ["--shapes", "1x9x2x8", "--family", "delta", "--first-call-ops", "kda", "--out", str(out)]
    assert script.main([*TINY, *one]) == 0
    records = {r["op"]: r for r in json.loads(out.read_text())}
    assert list(records) == names_of("delta")
    assert (records["kda"]["count"], records["kda"]["blocks"]) == (1, 1)
    assert records["deltaproduct"]["count"] == 2 and records["kda_blocks"]["blocks"] == 2
    assert {name for name, r in records.items() if r["first_call_s"] is not None} == {"kda"}
    k, v, out_and_q, beta = (9 * 2 * 2 * n for n in (2 * 8, 2 * 8, 2 * 8, 2))
    assert records["deltaproduct"]["floor_bytes"] == k + v + out_and_q + beta
    assert "B1 T9 H2 D8             KDA, 2 blocks" in capsys.readouterr().out
    assert script.main([*TINY, *one, "--minutes", "0"]) == 1
    assert "13 failed" in capsys.readouterr().out


@pytest.mark.slow
def test_the_script_runs_in_processes_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(BENCHMARKS / "speed.py"), *TINY, "--ops", "mamba2", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout and f"'torch': '{torch.__version__}'" in done.stdout
