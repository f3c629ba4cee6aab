"""``statemix bench``: what it times, with which inputs, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from statemix.benchmarks import bench
from statemix.benchmarks.ops import OPS, Sizes, names_of
from statemix.benchmarks.timing import Timing
from statemix.benchmarks.tune_command import save_tuning
from statemix.cli import main
from statemix.kernels.launch_config import TunedConfig, additive_config, delta_config, override
from statemix.recipes import load
from statemix.transitions import DiagonalGate, Householder, Product

CPU = torch.device("cpu")
TINY = ["--seq-len", "12", "--num-heads", "1", "--key-dim", "8", "--device", "cpu"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "time_both_ways", lambda run, leaves, **options: (run(), Timing(1.5, 4.25, 0))[1])


def rows(printed: str) -> list[list[str]]:
    """The lines below the titles, cut into words."""
    return [line.split() for line in printed.splitlines()[2:]]


def test_every_recurrence_is_timed_unless_some_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *TINY]) == 0
    printed = capsys.readouterr().out
    assert "no GPU used: the torch forms on the CPU" in printed and torch.__version__ in printed
    timed = names_of("all")
    assert len(timed) == 17
    for row, name in zip(rows(printed), timed, strict=True):
        assert " ".join(row).startswith(OPS[name].label)
    assert main(["bench", *TINY, "--key-dim", "9"]) == 0  # of which two blocks cannot be made
    assert len(rows(capsys.readouterr().out)) == 14
    assert main(["bench", *TINY, "--op", "kda", "--num-value-heads", "3", "--value-dim", "6"]) == 0
    assert rows(capsys.readouterr().out) == [
        "KDA B1 T12 H1 HV3 K8 V6 chunk, torch 1.500 - 4.250 - -".split()
    ]  # fmt: skip


def test_a_recipe_is_timed_layer_by_layer_at_its_own_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quickstart", "training.batch_size=2", "--seq-len", "9", "--device", "cpu"]) == 0
    assert rows(capsys.readouterr().out) == ["delta B2 T9 H4 D32 chunk, torch 1.500 - 4.250 - -".split()]


@pytest.mark.parametrize(
    "name", ["kda", "deltaproduct", "block-diagonal-deltanet", "linear-attention", "mamba2", "retnet"]
)
def test_the_recurrence_of_a_layer_is_that_of_its_mixer(name: str) -> None:
    [subject] = bench.recipe_subjects(load(name), batch=1, seq_len=10, dtype=torch.float32, device=CPU)
    transition, write = subject.make()
    assert subject.run().shape[:2] == (1, 10)
    leaves = {id(x) for x in subject.leaves}
    assert {id(x) for _, x, _ in transition.tensors()} | {id(x) for x in [write] if x is not None} <= leaves
    if name == "kda":
        assert isinstance(transition, Product)
        gate, erase = transition.steps()[0].left, transition.steps()[0].right  # type: ignore[attr-defined]
        assert isinstance(gate, DiagonalGate) and isinstance(erase, Householder)
        assert erase.direction is subject.k and erase.beta is write  # one tensor before, one after


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--op", "glaa"], ["op", "glaa", "gla"]),
        (["quickstart", "--op", "gla"], ["--op", "recipe"]),
        (["quickstart", "--key-dim", "8"], ["--key-dim", "recipe"]),
        (["quickstart", "--tune", "--out", "t.json"], ["--tune", "recipe"]),
        (["transformer-340m"], ["mixer of type state", "transformer-340m"]),
        (["missing.yaml"], ["missing.yaml"]),
        (["--num-heads", "2", "--num-value-heads", "3"], ["num_value_heads", "3"]),
        (["--tune"], ["--tune", "--out"]),
        (["--out", "t.json"], ["--out", "--tune"]),
        (["--tune", "--out", "t.json", "--device", "cpu"], ["tune", "GPU", "cpu"]),
        (["--tune", "--out", "no/t.json"], ["out", "no/t.json"]),
        (["--tune", "--out", "t.json", "--op", "gla", "kda_blocks", "--key-dim", "9"], ["--key-dim", "2 blocks", "9"]),
        (
            ["--tune", "--out", "t.json", "--op", "kda_blocks", "--key-dim", "1026"],
            ["--key-dim", "at most 1024", "1026"],
        ),
        (["--tune", "--out", "t.json", "--value-dim", "513"], ["--value-dim", "at most 512", "513"]),
        (["--tune", "--out", "."], ["--out", "folder"]),
        (["--tuned", "missing.json"], ["missing.json"]),
        (["--seq-len", "0"], ["--seq-len"]),
        (["--dtype", "float64"], ["--dtype", "float64"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_input_is_named_with_exit_code_2(
    arguments: list[str], named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["bench", *arguments])
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert [name for name in named if name not in captured.err] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_and_tiles_for_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda"]) == 2
    assert "without a usable GPU" in capsys.readouterr().err
    row = TunedConfig("sm_90", 16, 16, torch.bfloat16, additive_config("sm_90", 16, 16, torch.bfloat16))
    save_tuning("t.json", [(row, {})])
    for command in (["bench", *TINY, "--tuned", "t.json"], ["train", "quickstart", "--tuned", "t.json"]):
        assert main(command) == 2
        assert "t.json: expected rows for a machine without a GPU, got rows for sm_90" in capsys.readouterr().err


def test_tiles_of_a_file_are_in_use_while_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    config = additive_config("interpreter", 8, 8, torch.float32)
    row = TunedConfig("interpreter", 8, 8, torch.float32, config)
    save_tuning("t.json", [(row, {})])
    monkeypatch.setattr("statemix.kernels.tuning_file.device_arch", lambda device: "interpreter")
    monkeypatch.setattr("statemix.kernels.tuning_file.override", lambda rows: seen.append(list(rows)) or override(rows))
    assert main(["bench", *TINY, "--op", "gla", "--tuned", "t.json"]) == 0
    assert seen == [[row]]


def test_tuning_writes_its_file_and_says_what_it_gained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from statemix.benchmarks.tuning import Tuned
    from statemix.kernels.tuning_file import load_tuning

    sizes = ("sm_90", 8, 8, torch.float32)
    rows = {row_of: TunedConfig(*sizes, row_of(*sizes)) for row_of in (additive_config, delta_config)}
    asked = list[dict[str, Any]]()

    def tune(sizes: Sizes, **options: Any) -> Tuned:
        asked.append({**options, "sizes": sizes})
        row_of = delta_config if "kda" in options["ops"] else additive_config
        return Tuned(rows[row_of], 0.8 if row_of is additive_config else 1.0, {"gpu": "a name"})

    monkeypatch.setattr("statemix.benchmarks.tuning.tune", tune)
    assert main(["bench", *TINY, "--tune", "--out", "t.json"]) == 0
    assert load_tuning("t.json") == list(rows.values())
    assert {call["sizes"] for call in asked} == {Sizes(1, 12, 1, 1, 8, 8)}
    assert [call["ops"] for call in asked] == [
        ["linear_attention", "retnet", "mamba2", "gla"],
        ["deltanet", "gated_deltanet", "kda"],
    ]
    printed = capsys.readouterr().out
    assert "gla: 1.25 times as fast" in printed and "kda: none is faster" in printed


def test_what_was_tuned_is_kept_when_the_next_family_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from statemix.benchmarks.tuning import Tuned
    from statemix.kernels.tuning_file import load_tuning

    row = TunedConfig("sm_90", 8, 8, torch.float32, additive_config("sm_90", 8, 8, torch.float32))

    def tune(sizes: Sizes, *, ops: list[str], **options: Any) -> Tuned:
        if "kda" in ops:
            raise ValueError("a fault")
        return Tuned(row, 1.0, {})

    monkeypatch.setattr("statemix.benchmarks.tuning.tune", tune)
    with pytest.raises(ValueError, match="a fault"):
        main(["bench", *TINY, "--tune", "--out", "t.json"])
    assert load_tuning("t.json") == [row]


def test_recurrences_are_tuned_together_where_they_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from statemix.benchmarks.tuning import Tuned

    asked = list[list[str]]()
    row = TunedConfig("sm_90", 8, 8, torch.float32, additive_config("sm_90", 8, 8, torch.float32))
    monkeypatch.setattr(
        "statemix.benchmarks.tuning.tune", lambda sizes, *, ops, **_: (asked.append(ops), Tuned(row, 1.0, {}))[1]
    )
    ops = ["kda_blocks", "gla", "kda", "deltanet", "retnet", "deltanet_blocks", "gla"]
    assert main(["bench", *TINY, "--tune", "--out", "t.json", "--op", *ops]) == 0
    assert asked == [["kda_blocks", "deltanet_blocks"], ["gla", "retnet"], ["kda", "deltanet"]]


def test_running_out_of_memory_costs_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_much(run: object, leaves: object, **options: object) -> Timing:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(bench, "time_both_ways", too_much)
    assert main(["bench", *TINY, "--op", "gla", "retnet"]) == 0
    assert [" ".join(row[-3:]) for row in rows(capsys.readouterr().out)] == ["out of memory"] * 2
