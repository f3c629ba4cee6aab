"""Tuning: wrong candidates are left out, the best tiles of each kernel are joined, and the present row wins a draw."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from statemix.benchmarks import tuning
from statemix.benchmarks.candidates import candidates
from statemix.benchmarks.ops import OPS, Sizes, find_ops
from statemix.benchmarks.tuning import Both, Outcome, Trial, join_best, matters, tune
from statemix.benchmarks.worker_pool import Done
from statemix.kernels.launch_config import (
    AdditiveConfig,
    Config,
    Tiles,
    TunedConfig,
    additive_config,
    delta_config,
)

SIZES = Sizes(1, 20, 1, 1, 16, 16)
CPU = torch.device("cpu")
PRESENT = additive_config("interpreter", 16, 16, torch.float32)
FAST_SCAN = replace(PRESENT, scan=Tiles(16, 8, 2))
FASTER_SCAN = replace(PRESENT, scan=Tiles(16, 4, 3))
FAST_SUMMARY = replace(PRESENT, summary=Tiles(16, 4, 4))
WRONG = replace(PRESENT, gradients=Tiles(16, 8, 1))


def milliseconds(config: Config) -> float:
    """Of a made-up device: the choices gain independently of each other."""
    assert isinstance(config, AdditiveConfig)
    scan = {FAST_SCAN.scan: 0.9, FASTER_SCAN.scan: 0.8}.get(config.scan, 1.0)
    return 10 * scan * (0.5 if config.gradients == WRONG.gradients else 1.0) - (config.summary == FAST_SUMMARY.summary)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that run here, a table of candidates, one of them wrong, and times by ``milliseconds``."""

    def run_here(function: Callable[[Trial], Any], tasks: Iterator[Trial], **options: object) -> Iterator[Any]:
        for task in tasks:
            yield Done(task, function(task), "", 0.0)

    def times(trial: Trial) -> dict[str, Both]:
        return {op: Both(milliseconds(trial.config), 2 * milliseconds(trial.config)) for op in trial.ops}

    tried = [PRESENT, FAST_SCAN, FASTER_SCAN, FAST_SUMMARY, WRONG]
    monkeypatch.setattr(tuning, "run_isolated", run_here)
    monkeypatch.setattr(tuning, "candidates", lambda *sizes: tried)
    monkeypatch.setattr(tuning, "check_trial", lambda trial: "off by 1" if trial.config == WRONG else "")
    monkeypatch.setattr(tuning, "time_trial", times)


def tune_here(lines: list[str]) -> tuning.Tuned:
    ops = ("gla", "mamba2")
    return tune(SIZES, dtype=torch.float32, ops=ops, device=CPU, show=lines.append, num_workers=1, backend="torch")


def test_the_best_tiles_of_each_kernel_are_joined_and_wrong_ones_left_out(device: None) -> None:
    lines: list[str] = []
    tuned = tune_here(lines)
    assert tuned.row.config == replace(PRESENT, scan=FASTER_SCAN.scan, summary=FAST_SUMMARY.summary)
    assert tuned.score == pytest.approx(0.7)
    assert any("gradients 16x8x1: left out, off by 1" in line for line in lines)
    assert tuned.measured["ms"]["gla"]["forward_ms"] == pytest.approx(7.0)


def test_a_gain_within_the_noise_keeps_the_present_row(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda *sizes: [PRESENT, FAST_SCAN])
    monkeypatch.setattr(tuning, "LEAST_GAIN", 0.2)
    tuned = tune_here([])
    assert tuned.row.config == PRESENT and tuned.score == 1


@pytest.mark.parametrize(
    ("asked", "other", "key_dim"), [("gla", "retnet", 16), ("kda", "rwkv7", 16), ("kda_blocks", "deltanet", 8)]
)
def test_tiles_that_are_wrong_for_another_recurrence_of_their_row_are_not_kept(
    device: None, monkeypatch: pytest.MonkeyPatch, asked: str, other: str, key_dim: int
) -> None:
    [op] = find_ops([asked])
    row_of = additive_config if op.kernels == "additive" else delta_config
    present: Config = row_of("interpreter", key_dim, 16, torch.float32)
    faster, lines, checked = replace(present, summary=Tiles(16, 4, 4)), list[str](), set[tuple[str, int]]()

    def check(trial: Trial) -> str:
        checked.add((*trial.ops, trial.sizes.key_dim))
        return "off by 2" if (trial.config, trial.ops) == (faster, (other,)) else ""

    monkeypatch.setattr(tuning, "candidates", lambda row: [present, faster])
    monkeypatch.setattr(tuning, "check_trial", check)
    monkeypatch.setattr(tuning, "time_trial", lambda trial: {asked: Both(1.0 + (trial.config == present), 2.0)})
    made = tune(SIZES, dtype=torch.float32, ops=[asked], device=CPU, show=lines.append, num_workers=1, backend="torch")
    assert made.row.config == present and made.score == 1 and lines[-1] == "summary 16x4x4: left out, off by 2"
    assert checked == {(each.name, key_dim * each.blocks) for each in OPS.values() if each.kernels == op.kernels}


def test_a_present_row_that_is_wrong_ends_it(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "check_trial", lambda trial: "off by 1")
    with pytest.raises(ValueError, match="expected the present tiles to run and to be right"):
        tune_here([])


def test_without_a_gpu_and_for_recurrences_of_two_rows_it_says_so() -> None:
    arguments: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "show": print}
    with pytest.raises(ValueError, match="expected a GPU, got device cpu"):
        tune(SIZES, ops=["gla"], **arguments)
    for ops in (["gla", "kda"], ["kda", "kda_blocks"]):
        with pytest.raises(ValueError, match=f"one family of kernels .* got {ops[0]} .*, {ops[1]} .*; tune them apart"):
            tune(SIZES, ops=ops, backend="torch", **arguments)


def test_what_workers_do_runs_on_a_cpu() -> None:
    trial = Trial(PRESENT, "interpreter", replace(SIZES, key_dim=8), torch.float32, ("gla",), "cpu", "torch")
    assert tuning.check_trial(trial) == ""
    timing = tuning.time_trial(trial)["gla"]
    assert 0 < timing.forward_ms < timing.forward_backward_ms


def test_only_tiles_of_kernels_that_run_are_tried() -> None:
    delta = delta_config("interpreter", 16, 16, torch.float32)
    reads = {
        "gla": {"channel_scan", "channel_scores", "channel_gradients"},
        "mamba2": {"scan", "saving", "reverse", "gradients"},
        "retnet": {"scan", "reverse", "gradients"},
        "deltanet": {"intra_chunk", "max_registers", "scan", "saving", "reverse", "gradients"},
        "kda": {"intra_chunk", "max_registers", "scan", "saving", "reverse", "channel_scores", "channel_gradients"},
        "deltanet_blocks": {"intra_chunk", "max_registers", "outputs", "reverse", "gradients"},
    }
    for name, own in reads.items():
        [op] = find_ops([name])
        present: Config = PRESENT if op.kernels == "additive" else delta
        assert matters(present, present, [op])
        for field in fields(present):
            before = getattr(present, field.name)
            other = Tiles(64, 8, 2) if isinstance(before, Tiles) else 64
            expected = field.name in {*own, "chunk_size", "fill", "summary"}
            assert matters(replace(present, **{field.name: other}), present, [op]) == expected, (name, field.name)


@pytest.mark.parametrize(("name", "key_dim"), [("deltanet", 16), ("kda_blocks", 8)])
def test_a_row_of_the_delta_family_is_of_the_channels_of_one_block(
    device: None, monkeypatch: pytest.MonkeyPatch, name: str, key_dim: int
) -> None:
    present = delta_config("interpreter", key_dim, 16, torch.float32)
    faster = replace(present, reverse=Tiles(16, 8, 2))
    monkeypatch.setattr(tuning, "candidates", lambda *given: [present, faster])
    monkeypatch.setattr(tuning, "time_trial", lambda trial: {name: Both(1.0 + (trial.config == present), 2.0)})
    made = tune(SIZES, dtype=torch.float32, ops=[name], device=CPU, show=print, num_workers=1, backend="torch")
    assert made.row == TunedConfig("interpreter", key_dim, 16, torch.float32, faster)


def test_joining_changes_nothing_without_a_gain() -> None:
    base = Outcome(PRESENT, {"gla": Both(1.0, 2.0)})
    slower = [
        Outcome(config, {"gla": Both(1.1, 2.0)})
        for config in candidates(TunedConfig("interpreter", 16, 16, torch.float32, PRESENT))
    ]
    assert join_best(slower, base) == PRESENT
