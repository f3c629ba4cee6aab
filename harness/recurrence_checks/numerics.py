"""Checks at the edges: precisions, gates at their limits, repeated keys, memory that was never written."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from statemix.harness.check import CheckFailure, check
from statemix.harness.memory import new_memory
from statemix.harness.problem import Axes, Problem
from statemix.transitions import ScanResult

from .recurrence import Recurrence, Run, differentiate

HARDEST = -80.0  # e^-80 is the smallest decay that still has a float32 gradient


@check("float32, bfloat16 and float16 inputs: as exact as the definition in float32, states in float32")
def precisions_are_honoured(recurrence: Recurrence) -> None:
    whole = recurrence.problem()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        problem = whole.to(dtype)
        problem = replace(problem, initial_state=problem.initial_state.float())  # type: ignore[union-attr]
        recurrence.expect_definition(problem)
        for run in recurrence.runs():
            for name, x in differentiate(run, problem).items():
                expected = torch.float32 if name in ("final_state", "d initial_state") else dtype
                if x.dtype != expected:
                    raise CheckFailure(f"{name}: expected {expected} for inputs of {dtype}, got {x.dtype}")


@check("float32 gates and writes beside bfloat16 q, k, v")
def mixed_precisions_are_honoured(recurrence: Recurrence) -> None:
    problem = recurrence.problem(has_state=False)
    mixed = problem.map(lambda axes, x: x.to(torch.bfloat16 if axes.is_vector else torch.float32))
    recurrence.expect_definition(mixed)


@check("autocast changes nothing: the recurrence stays in float32")
def autocast_is_ignored(recurrence: Recurrence) -> None:
    problem = recurrence.problem().to(torch.float32)
    for run in recurrence.runs():
        recurrence.expect_equal(differentiate(_under_autocast(run), problem), differentiate(run, problem))


@check(
    "log decays at 0, -1e-4, -5 and -80, mixed across channels and along time, as spikes, ramps and resets",
    needs=["has_decay"],
)
def extreme_decays_are_exact(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    for pattern in range(NUM_PATTERNS):
        hard = problem.map(partial(_pattern, pattern))
        recurrence.expect_definition(hard)
        recurrence.expect_definition(hard.to(torch.float32))


@check("gate 0 equals no gate", needs=["has_decay"])
def zero_log_decay_is_no_decay(recurrence: Recurrence) -> None:
    problem = recurrence.problem().map(lambda axes, x: torch.zeros_like(x) if axes.is_log_decay else x)
    recurrence.expect_definition(problem)


@check("equal keys: every token erases the same direction", needs=["has_direction"])
def equal_keys_are_exact(recurrence: Recurrence) -> None:
    problem = recurrence.problem()

    def repeat_first(axes: Axes, x: Tensor) -> Tensor:
        first = x.narrow(1, 0, 1)
        return first.expand_as(x).clone() if axes.is_unit else x

    repeated = problem.map(repeat_first)
    for rate in (None, 1.0, 2.0):
        fixed = repeated if rate is None else _with_rates(repeated, rate)
        if fixed is not None:
            recurrence.expect_definition(fixed)


@check("gradcheck: numerical and analytical gradients agree", needs=["float64"])
def gradcheck_passes(recurrence: Recurrence) -> None:
    seq_len = min(recurrence.sizes.seq_len, 3)
    leaves = recurrence.problem(batch=1, seq_len=seq_len, num_heads=1, num_value_heads=1, value_dim=2).leaves()
    tensors = list(leaves.tensors().values())

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        new = dict(zip(map(id, tensors), values, strict=True))
        result = recurrence.runs()[-1](leaves.map(lambda _, x: new[id(x)]))
        return result.output, result.final_state

    try:
        torch.autograd.gradcheck(function, tensors, fast_mode=True)
    except RuntimeError as error:
        raise CheckFailure(f"gradcheck: {str(error).splitlines()[0]}") from None


@check("NaN in memory that was never written does not reach a result")
def unwritten_memory_is_never_read(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    for run in recurrence.runs():
        with new_memory(is_nan=False):
            expected = differentiate(run, problem)
        with new_memory(is_nan=True):
            recurrence.expect_equal(differentiate(run, problem), expected)


@check("what lies behind a tensor in memory does not matter, be it NaN or 1e30")
def neighbours_in_memory_do_not_matter(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    for run in recurrence.runs():
        expected = differentiate(run, problem)
        for poison in (torch.nan, 1e30):
            got = differentiate(run, problem.map(partial(_in_front_of, poison)))
            recurrence.expect_equal(got, expected)


NUM_PATTERNS = 7


def _under_autocast(run: Run) -> Run:
    def cast(problem: Problem) -> ScanResult:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(problem)

    return cast


def _pattern(pattern: int, axes: Axes, x: Tensor) -> Tensor:
    """All at a bound, one spike, alternating, a ramp, resets, levels mixed over tokens and channels."""
    if not axes.is_log_decay:
        return x
    seq_len = x.shape[1] if axes.token is not None else 1
    token = torch.arange(seq_len).view(-1, *[1] * (x.ndim - 2))
    levels = torch.tensor([0.0, -1e-4, -5.0, HARDEST], dtype=x.dtype)
    patterns = (
        torch.tensor(HARDEST),
        torch.tensor(-5.0),
        torch.where(token == seq_len // 2, HARDEST, 0.0),
        torch.where(token % 2 == 0, HARDEST, 0.0),
        -5.0 * token / seq_len,
        torch.where(token % 8 == 7, HARDEST, -1e-4),
        levels[(3 * token + torch.arange(x.shape[-1])) % len(levels)],
    )
    return patterns[pattern].to(x.dtype).expand_as(x).clone()


def _with_rates(problem: Problem, rate: float) -> Problem | None:
    """Every rate set to ``rate``; None where one of them may not be that large."""
    kinds = [kind for _, _, kind in problem.transition.tensors() if kind.low == 0]
    if not kinds or any(kind.high < rate for kind in kinds):
        return None
    rates = {id(x) for _, x, kind in problem.transition.tensors() if kind.low == 0}
    return problem.map(lambda _, x: torch.full_like(x, rate) if id(x) in rates else x)


def _in_front_of(poison: float, axes: Axes, x: Tensor) -> Tensor:
    """The same values in a buffer whose remainder is ``poison``."""
    poisoned = torch.full((x.numel() + 64,), poison, dtype=x.dtype)
    return torch.cat([x.flatten(), poisoned])[: x.numel()].view(x.shape)
