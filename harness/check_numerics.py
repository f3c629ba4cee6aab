"""Checks at the edges: precisions, gates at their limits, repeated keys, memory that was never written."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from statemix.transitions import ScanResult

from .check import check
from .context import CheckFailure, Context, Run, differentiate, expect_definition, expect_equal
from .problem import Axes, Problem, Sizes

HARDEST = -80.0  # e^-80 is the smallest decay that still has a float32 gradient


def _has_decay(problem: Problem) -> bool:
    return any(axes.is_log_decay and axes.token is not None for _, _, axes in problem.named())


def _has_direction(problem: Problem) -> bool:
    return any(axes.is_unit for _, _, axes in problem.named())


@check("float32, bfloat16 and float16 inputs: as exact as the definition in float32, states in float32")
def precisions_are_honoured(context: Context, sizes: Sizes) -> None:
    whole = context.problem(sizes)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        problem = whole.to(dtype)
        problem = replace(problem, initial_state=problem.initial_state.float())  # type: ignore[union-attr]
        for form in context.forms():
            expect_definition(context.run(form), problem)
            got = differentiate(context.run(form), problem)
            for name, x in got.items():
                wanted = torch.float32 if name in ("final_state", "d initial_state") else dtype
                if x.dtype != wanted:
                    raise CheckFailure(f"{name}: expected {wanted} for inputs of {dtype}, got {x.dtype}")


@check("float32 gates and writes beside bfloat16 q, k, v")
def mixed_precisions_are_honoured(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes, has_state=False)
    mixed = problem.map(lambda axes, x: x.to(torch.bfloat16 if axes.is_vector else torch.float32))
    for form in context.forms():
        expect_definition(context.run(form), mixed)


@check("autocast changes nothing: the recurrence stays in float32")
def autocast_is_ignored(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes).to(torch.float32)

    def under_autocast(run: Run) -> Run:
        def cast(p: Problem) -> ScanResult:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return run(p)

        return cast

    for form in context.forms():
        run = context.run(form)
        expect_equal(differentiate(under_autocast(run), problem), differentiate(run, problem))


@check(
    "log decays at 0, -1e-4, -5 and -80, mixed across channels and along time, as spikes, ramps and resets",
    applies=_has_decay,
)
def extreme_decays_are_exact(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    for pattern in range(NUM_PATTERNS):
        hard = problem.map(functools.partial(_pattern, pattern))
        for form in context.forms():
            expect_definition(context.run(form), hard)
            expect_definition(context.run(form), hard.to(torch.float32))


@check("gate 0 equals no gate", applies=_has_decay)
def zero_log_decay_is_no_decay(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes).map(lambda axes, x: torch.zeros_like(x) if axes.is_log_decay else x)
    for form in context.forms():
        expect_definition(context.run(form), problem)


@check("equal keys: every token erases the same direction", applies=_has_direction)
def equal_keys_are_exact(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)

    def repeat_first(axes: Axes, x: Tensor) -> Tensor:
        first = x.narrow(1, 0, 1)
        return first.expand_as(x).clone() if axes.is_unit else x

    repeated = problem.map(repeat_first)
    for rate in (None, 1.0, 2.0):
        fixed = repeated if rate is None else _with_rates(repeated, rate)
        if fixed is not None:
            for form in context.forms():
                expect_definition(context.run(form), fixed)


@check("gradcheck: numerical and analytical gradients agree", needs_float64=True)
def gradcheck_passes(context: Context, sizes: Sizes) -> None:
    small = replace(sizes, batch=1, seq_len=min(sizes.seq_len, 3), num_heads=1, num_value_heads=1, value_dim=2)
    leaves = context.problem(small).leaves()
    tensors = list(leaves.tensors().values())

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        new = dict(zip(map(id, tensors), values, strict=True))
        result = context.run(context.forms()[-1])(leaves.map(lambda _, x: new[id(x)]))
        return result.output, result.final_state

    try:
        torch.autograd.gradcheck(function, tensors, fast_mode=True)
    except RuntimeError as error:
        raise CheckFailure(f"gradcheck: {str(error).splitlines()[0]}") from None


@check("NaN in memory that was never written does not reach a result")
def unwritten_memory_is_never_read(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    for form in context.forms():
        want = differentiate(context.run(form), problem)
        with _allocations_of_nan():
            got = differentiate(context.run(form), problem)
        expect_equal(got, want)


@check("what lies behind a tensor in memory does not matter, be it NaN or 1e30")
def neighbours_in_memory_do_not_matter(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    for form in context.forms():
        want = differentiate(context.run(form), problem)
        for poison in (torch.nan, 1e30):
            got = differentiate(context.run(form), problem.map(functools.partial(_in_front_of, poison)))
            expect_equal(got, want)


NUM_PATTERNS = 7


@contextmanager
def _allocations_of_nan() -> Iterator[None]:
    """``torch.empty`` gives NaN: what deterministic mode fills memory with."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fill_uninitialized_memory is on by default
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


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
