"""Choosing tile sizes for one size of head on this GPU: ``statemix bench --tune``.

Each candidate differs from the present configuration in the tiles of one kernel. All of them are compiled and held
against float64 first, several at a time, each in a process that it may take down; those that are right are then timed
one by one, the launches alone, since what Python takes to start them differs by more from run to run. The best choice
for each kernel goes into one configuration, which is checked and timed like the others. It is as good as the geometric
mean, over the recurrences asked for, of forward and of forward and backward against the present one.

Each family of kernels has configurations of its own, so recurrences of one family are tuned together. One serves all of
them, whole heads and blocks as wide: the best is checked for those that were not asked for too.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from statemix.harness.recurrences import NamedRecurrence
from statemix.kernels.launch_config import (
    Arch,
    Config,
    Tiles,
    TunedConfig,
    additive_config,
    delta_config,
    device_arch,
    override,
)

from .against_float64 import Case, check_case
from .candidates import candidates
from .measured_on import gpu_name
from .ops import OPS, Sizes, find_ops
from .timed_scan import TimedScan
from .timing import graph_ms, time_both_ways
from .worker_pool import run_isolated

# One whole batch, one that is cut into segments, packed documents that begin inside a chunk.
CHECKS = (
    Case("batch", 2, 200),
    Case("long", 1, 1000),
    Case("packed", 1, 600, offsets=(0, 0, 5, 70, 330, 590)),
)
LEAST_GAIN = 0.01  # of the time; less is noise between two runs of one kernel
TIMEOUT_S = 180.0
REP_MS = 100  # spent on each figure


class Both(NamedTuple):
    """Milliseconds of a forward pass, and of forward and backward."""

    forward_ms: float
    forward_backward_ms: float


Times = dict[str, Both]


@dataclass(frozen=True)
class Trial:
    """One configuration to check or to time, picklable.

    Attributes:
        sizes: of the heads, K of all their blocks.
        ops: names of the recurrences, all of one family and with as many blocks.
        backend, device: "triton" on a "cuda" device; tests take others.
    """

    config: Config
    arch: Arch
    sizes: Sizes
    dtype: torch.dtype
    ops: tuple[str, ...]
    device: str
    backend: str

    @property
    def row(self) -> TunedConfig:
        key_dim = self.sizes.key_dim // find_ops(self.ops)[0].blocks
        return TunedConfig(self.arch, key_dim, self.sizes.value_dim, self.dtype, self.config)


@dataclass(frozen=True)
class Outcome:
    """A configuration that is right.

    Attributes:
        times: milliseconds by recurrence.
    """

    config: Config
    times: Times

    def score(self, present: "Outcome") -> float:
        """Geometric mean of times relative to those of the present one: below 1 is faster."""
        logs = [
            math.log(mine / theirs)
            for op, both in self.times.items()
            for mine, theirs in zip(both, present.times[op], strict=True)
        ]
        return math.exp(sum(logs) / len(logs))


@dataclass(frozen=True)
class Tuned:
    """The configuration to keep, and its ``score`` of ``Outcome``, 1 when the present one is the best."""

    row: TunedConfig
    score: float
    measured: dict[str, Any]


def tune(
    sizes: Sizes,
    *,
    dtype: torch.dtype,
    ops: Sequence[str],
    device: torch.device,
    show: Callable[[str], None],
    num_workers: int | None = None,
    backend: str = "triton",
) -> Tuned:
    """Try the candidates for heads of this size; ``show`` gets a line for each as it ends.

    Raises:
        ValueError: no GPU, recurrences that do not share a configuration, or the present one is wrong.
    """
    if device.type != "cuda" and backend == "triton":
        raise ValueError(f"tune: expected a GPU, got device {device.type}; the torch forms have no tiles to choose")
    found = find_ops(tuple(ops))
    arch = device_arch(device)
    present = _present_config(found, arch, sizes, dtype)
    first = Trial(present, arch, sizes, dtype, tuple(ops), str(device), backend)
    tried = candidates(first.row)
    trials = [replace(first, config=config) for config in tried if matters(config, present, found)]
    num_workers = num_workers or max(1, (os.cpu_count() or 2) - 2)
    outcomes = list(_right_ones(trials, present, num_workers, show))
    base = next((outcome for outcome in outcomes if outcome.config == present), None)
    if base is None:
        raise ValueError("tune: expected the present tiles to run and to be right, got the fault above; report it")
    joined = join_best(outcomes, base)
    if joined not in [outcome.config for outcome in outcomes]:
        outcomes += _right_ones([replace(first, config=joined)], present, 1, show)
    best = min(outcomes, key=lambda outcome: outcome.score(base))
    best = best if best.score(base) < 1 - LEAST_GAIN else base
    if best is not base and not _is_right_for_all(replace(first, config=best.config), present, num_workers, show):
        best = base
    measured = {
        "sizes": str(sizes),
        "gpu": gpu_name(str(device)),
        "torch": torch.__version__,
        "ms": {op: both._asdict() for op, both in best.times.items()},
        "ms_before": {op: both._asdict() for op, both in base.times.items()},
    }
    return Tuned(replace(first, config=best.config).row, best.score(base), measured)


def _present_config(ops: Sequence[NamedRecurrence], arch: Arch, sizes: Sizes, dtype: torch.dtype) -> Config:
    """The configuration that recurrences of one kind have now."""
    kinds = {(op.kernels, op.blocks) for op in ops}
    if len(kinds) != 1:
        got = ", ".join(f"{op.name} ({op.kernels}, {op.blocks} blocks)" for op in ops)
        raise ValueError(
            "ops: expected recurrences that share a configuration, of one family of kernels and one number of blocks, "
            f"got {got}; tune them apart"
        )
    [(kernels, blocks)] = kinds
    if sizes.key_dim % blocks:
        raise ValueError(f"key_dim: expected a multiple of {blocks} blocks, got {sizes.key_dim}; choose another")
    config_of = additive_config if kernels == "additive" else delta_config
    return config_of(arch, sizes.key_dim // blocks, sizes.value_dim, dtype)


def join_best(outcomes: Sequence[Outcome], base: Outcome) -> Config:
    """The present configuration with, for each kernel, the tiles that gained most on their own."""
    joined = base.config
    for field in fields(joined):
        changed = [
            outcome
            for outcome in outcomes
            if getattr(outcome.config, field.name) != getattr(base.config, field.name)
            and outcome.score(base) < 1 - LEAST_GAIN
        ]
        if changed:
            best = min(changed, key=lambda outcome: outcome.score(base))
            joined = replace(joined, **{field.name: getattr(best.config, field.name)})
    return joined


def _right_ones(
    trials: Sequence[Trial], present: Config, num_workers: int, show: Callable[[str], None]
) -> Iterator[Outcome]:
    """Check all, then time those that are right, one at a time on an otherwise idle device."""
    right: list[Trial] = []
    for checked in run_isolated(check_trial, trials, num_workers=num_workers, timeout_s=TIMEOUT_S):
        if not checked.failure and not checked.result:
            right.append(checked.task)
        else:
            show(f"{_say(checked.task.config, present)}: left out, {checked.failure or checked.result}")
    for timed in run_isolated(time_trial, right, num_workers=1, timeout_s=TIMEOUT_S):
        if timed.result is None:
            show(f"{_say(timed.task.config, present)}: left out, {timed.failure}")
            continue
        times = "  ".join(f"{op} {forward:.3f} / {both:.3f}" for op, (forward, both) in timed.result.items())
        show(f"{_say(timed.task.config, present)}: {times} ms")
        yield Outcome(timed.task.config, timed.result)


def _is_right_for_all(trial: Trial, present: Config, num_workers: int, show: Callable[[str], None]) -> bool:
    """Check a configuration for the recurrences that were not asked for and will run with it: a block is a head too."""
    trials = []
    for op in OPS.values():
        sizes = replace(trial.sizes, key_dim=trial.row.key_dim * op.blocks)
        if op.kernels == find_ops(trial.ops)[0].kernels and op.name not in trial.ops:
            trials.append(replace(trial, sizes=sizes, ops=(op.name,)))
    is_right = True
    for checked in run_isolated(check_trial, trials, num_workers=num_workers, timeout_s=TIMEOUT_S):
        if checked.failure or checked.result:
            show(f"{_say(trial.config, present)}: left out, {checked.failure or checked.result}")
            is_right = False
    return is_right


def check_trial(trial: Trial) -> str:
    """What is wrong with a configuration; empty if nothing is."""
    with override([trial.row]):
        for op in find_ops(trial.ops):
            for case in CHECKS:
                finding = check_case(
                    op,
                    case,
                    key_dim=trial.sizes.key_dim,
                    value_dim=trial.sizes.value_dim,
                    dtype=trial.dtype,
                    device=torch.device(trial.device),
                    backend=trial.backend,
                )
                if finding.faults:
                    return f"{op.name}, {case.name}: {finding.faults[0]}"
            # Other heads are other kernels: compile them here, side by side, and not while they are timed.
            call, _ = _call_on(op, trial)
            call().sum().backward()
            with torch.no_grad():
                call()
    return ""


def time_trial(trial: Trial) -> Times:
    """Times of a configuration for each recurrence."""
    times = {}
    with override([trial.row]):
        for op in find_ops(trial.ops):
            call, leaves = _call_on(op, trial)
            if trial.device == "cpu":
                timing = time_both_ways(call, leaves, rep_ms=REP_MS)
                times[op.name] = Both(timing.forward_ms, timing.forward_backward_ms)
            else:
                times[op.name] = Both(*graph_ms(call, leaves, rep_ms=REP_MS))
    return times


def _call_on(op: NamedRecurrence, trial: Trial) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A call of ``scan``, and the inputs that get gradients: all but RetNet's constants."""
    dtype = str(trial.dtype).removeprefix("torch.")
    timed = TimedScan(op.name, trial.sizes, dtype, trial.device, trial.backend, is_recomputed=False, rep_ms=REP_MS)
    operands = timed.operands()
    return timed.call_on(operands), [x for x in op.inputs(operands).values() if x.requires_grad]


def matters(config: Config, present: Config, ops: Sequence[NamedRecurrence]) -> bool:
    """Whether one of the recurrences runs a kernel that differs from the present one."""
    changed = {f.name for f in fields(config) if getattr(config, f.name) != getattr(present, f.name)}
    return not changed or any(not changed.isdisjoint(_read_by(op)) for op in ops)


def _read_by(op: NamedRecurrence) -> set[str]:
    """The fields whose kernels a recurrence runs. ``scan`` also has a say in where any is cut, which ``fill`` tries."""
    shared = {"chunk_size", "fill", "summary"}
    has_channels = "channel_decay" in op.uses
    if op.kernels == "additive":
        if has_channels:
            return {*shared, "channel_scan", "channel_scores", "channel_gradients"}
        return {*shared, "scan", "reverse", "gradients"} | ({"saving"} if "scalar_decay" in op.uses else set())
    shared |= {"intra_chunk", "max_registers", "reverse"}
    shared |= {"channel_scores", "channel_gradients"} if has_channels else {"gradients"}
    return shared | ({"outputs"} if op.blocks > 1 else {"scan", "saving"})


def _say(config: Config, present: Config) -> str:
    """A configuration by what differs from the present one."""
    changes = []
    for field in fields(config):
        value = getattr(config, field.name)
        if value != getattr(present, field.name):
            text = "x".join(map(str, asdict(value).values())) if isinstance(value, Tiles) else value
            changes.append(f"{field.name} {text}")
    return ", ".join(changes) or "present tiles"
