"""Checks of what must not matter: the future, the order of heads and rows, the memory layout, absent arguments."""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from statemix.transitions import ScanResult

from .check import check
from .context import Context, Run, expect_definition, expect_equal, expect_equivalent, random_weights
from .definition import definition
from .problem import Axes, Change, Problem, Sizes


@check("changing the future changes neither outputs nor gradients of the past, bit for bit")
def future_does_not_leak(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    for present in {max(sizes.seq_len // 6, 1), sizes.seq_len // 2, sizes.seq_len - 1} - {0}:
        changed = problem.map(functools.partial(_replace_future, present))
        for form in context.forms():
            first, second = (_prefix(context, x, form, present) for x in (problem, changed))
            expect_equal(second, first)


@check("permuting the heads of every input permutes outputs and gradients")
def heads_are_independent(context: Context, sizes: Sizes) -> None:
    _expect_permutation(context, sizes, lambda axes: axes.head)


@check("permuting the batch permutes outputs and gradients")
def batch_rows_are_independent(context: Context, sizes: Sizes) -> None:
    _expect_permutation(context, sizes, lambda axes: axes.batch)


@check("grouped value heads equal key heads repeated by hand")
def grouped_heads_equal_repeated_ones(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    groups = sizes.num_value_heads // sizes.num_heads

    def repeat(axes: Axes, x: Tensor) -> Tensor:
        return x.repeat_interleave(groups, axes.head) if axes.is_key_head and axes.head is not None else x

    for form in context.forms():
        run = context.run(form)
        expect_equivalent(run, _after(repeat, definition), problem)


@check("transposed, sliced and expanded inputs give what contiguous ones give")
def strides_do_not_matter(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    for form in context.forms():
        run = context.run(form)
        for layout in (_transposed, _every_second):
            expect_equivalent(_after(layout, run), definition, problem)


@check("upstream gradients that are views (a concatenation, a sum, a transpose) are honoured")
def strided_gradients_are_honoured(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)

    def through_views(run: Run) -> Run:
        def views(p: Problem) -> ScanResult:
            output, state = run(p)
            return ScanResult(torch.cat([output, 2 * output], dim=-1).transpose(1, 2), state.sum(dim=(1, 2)))

        return views

    for form in context.forms():
        expect_equivalent(through_views(context.run(form)), through_views(definition), problem)


@check("an absent write, scale or state is 1, K ** -0.5, zeros")
def absent_arguments_are_neutral(context: Context, sizes: Sizes) -> None:
    problem = replace(context.problem(sizes, has_state=False), write=None)
    ones = problem.v.new_ones(problem.v.shape[:-1])
    shape = (sizes.batch, sizes.num_value_heads, sizes.value_dim, sizes.key_dim)

    def spelled_out(run: Run) -> Run:
        def run_with_all(p: Problem) -> ScanResult:
            return run(replace(p, write=ones.to(p.v), initial_state=p.v.new_zeros(shape)))

        return run_with_all

    for form in context.forms():
        expect_definition(context.run(form), problem)
        expect_definition(spelled_out(context.run(form, scale=sizes.key_dim**-0.5)), problem)


@check("scale multiplies the output and nothing else")
def scale_multiplies_the_output(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    for scale in (1.0, 0.3):
        for form in context.forms():
            expect_equivalent(context.run(form, scale=scale), functools.partial(definition, scale=scale), problem)


@check("a token that writes nothing changes the state by M_t alone")
def zero_write_only_forgets(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    shape = problem.v.shape[:-1] if problem.write is None else problem.write.shape
    silent = replace(problem, write=problem.v.new_zeros(shape))
    for form in context.forms():
        expect_definition(context.run(form), silent)


def _after(change: Change, run: Run) -> Run:
    """``run`` on the problem after ``change``."""
    return lambda problem: run(problem.map(change))


def _replace_future(present: int, axes: Axes, x: Tensor) -> Tensor:
    """Other values in range from token ``present`` on: what other tokens hold, scaled where that stays in range."""
    if axes.token is None:
        return x
    past, future = x.split([present, x.shape[axes.token] - present], dim=axes.token)
    future = future.roll(1, dims=axes.head) if axes.head is not None else future
    future = 40 * future if axes.is_log_decay else -future if axes.is_unit else 0.5 * future
    return torch.cat([past, future], dim=axes.token)


def _prefix(context: Context, problem: Problem, form: str, present: int) -> dict[str, Tensor]:
    """Outputs and gradients of the first ``present`` tokens, for a loss on those outputs."""
    leaves = problem.leaves()
    output = context.run(form)(leaves).output[:, :present]
    weight = random_weights(output, torch.Generator().manual_seed(6))
    names, tensors = zip(*leaves.tensors().items(), strict=True)
    grads = torch.autograd.grad((output * weight).sum(), tensors, allow_unused=True, materialize_grads=True)
    batch, seq_len = problem.q.shape[:2]
    kept = {
        f"d {name}": g[:, :present] if g.shape[:2] == (batch, seq_len) else g
        for name, g in zip(names, grads, strict=True)
    }
    return {"output": output.detach()} | kept


def _expect_permutation(context: Context, sizes: Sizes, axis: Callable[[Axes], int | None]) -> None:
    """With one axis of every input reversed, outputs and gradients come out reversed, as closely as rounding allows."""
    problem = context.problem(sizes)

    def reverse(axes: Axes, x: Tensor) -> Tensor:
        place = axis(axes)
        return x if place is None else x.flip(place)

    def in_reverse(run: Run) -> Run:
        def reversed_twice(p: Problem) -> ScanResult:
            output, state = run(p.map(reverse))
            return ScanResult(reverse(Axes(0, 1, 2), output), reverse(Axes(0, None, 1), state))

        return reversed_twice

    for form in context.forms():
        run = context.run(form)
        expect_equivalent(in_reverse(run), run if context.dtype == torch.float64 else definition, problem)


def _transposed(axes: Axes, x: Tensor) -> Tensor:
    """The same values with the first two axes swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x


def _every_second(axes: Axes, x: Tensor) -> Tensor:
    """The same values as every second entry of the last axis of a wider tensor whose other entries are NaN."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]
