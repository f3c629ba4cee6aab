"""Checks of what must not matter: the future, the order of heads and sequences, the memory layout, absent arguments."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from statemix.harness.check import check
from statemix.harness.context import gradients
from statemix.harness.memory import every_second, transposed
from statemix.harness.problem import Axes, Change, Problem

from .definition import definition
from .recurrence import Recurrence, Run, around


@check("changing the future changes neither outputs nor gradients of the past, bit for bit")
def future_does_not_leak(recurrence: Recurrence) -> None:
    problem, seq_len = recurrence.problem(), recurrence.sizes.seq_len
    for present in {max(seq_len // 6, 1), seq_len // 2, seq_len - 1} - {0}:
        changed = problem.map(partial(_replace_future, present))
        for run in recurrence.runs():
            recurrence.expect_equal(_past(run, changed, present), _past(run, problem, present))


@check("permuting the heads of every input permutes outputs and gradients")
def heads_are_independent(recurrence: Recurrence) -> None:
    _expect_permutation(recurrence, lambda axes: axes.head)


@check("permuting the batch permutes outputs and gradients")
def batch_rows_are_independent(recurrence: Recurrence) -> None:
    _expect_permutation(recurrence, lambda axes: axes.batch)


@check("grouped value heads equal key heads repeated by hand")
def grouped_heads_equal_repeated_ones(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    groups = recurrence.sizes.num_value_heads // recurrence.sizes.num_heads

    def repeat(axes: Axes, x: Tensor) -> Tensor:
        return x.repeat_interleave(groups, axes.head) if axes.is_key_head and axes.head is not None else x

    recurrence.expect_equivalent(recurrence.runs(), around(definition, before=_each(repeat)), problem)


@check("transposed, sliced and expanded inputs give what contiguous ones give")
def strides_do_not_matter(recurrence: Recurrence) -> None:
    layouts: list[Change] = [lambda _, x: transposed(x), lambda _, x: every_second(x)]
    runs = [around(run, before=_each(layout)) for run in recurrence.runs() for layout in layouts]
    recurrence.expect_equivalent(runs, definition, recurrence.problem())


@check("upstream gradients that are views (a concatenation, a sum, a transpose) are honoured")
def strided_gradients_are_honoured(recurrence: Recurrence) -> None:
    *runs, reference = (around(run, after=_as_views) for run in (*recurrence.runs(), definition))
    recurrence.expect_equivalent(runs, reference, recurrence.problem())


@check("an absent write, scale or state is 1, K ** -0.5, zeros")
def absent_arguments_are_neutral(recurrence: Recurrence) -> None:
    problem = replace(recurrence.problem(has_state=False), write=None)
    recurrence.expect_definition(problem)
    runs = [around(run, before=_spelled_out) for run in recurrence.runs(scale=recurrence.sizes.key_dim**-0.5)]
    recurrence.expect_equivalent(runs, definition, problem)


@check("scale multiplies the output and nothing else")
def scale_multiplies_the_output(recurrence: Recurrence) -> None:
    for scale in (1.0, 0.3):
        runs, reference = recurrence.runs(scale=scale), partial(definition, scale=scale)
        recurrence.expect_equivalent(runs, reference, recurrence.problem())


@check("a token that writes nothing changes the state by M_t alone")
def zero_write_only_forgets(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    shape = problem.v.shape[:-1] if problem.write is None else problem.write.shape
    recurrence.expect_definition(replace(problem, write=problem.v.new_zeros(shape)))


def _each(change: Change) -> Callable[[Problem], Problem]:
    """Every tensor of a problem changed."""
    return lambda problem: problem.map(change)


def _as_views(output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat([output, 2 * output], dim=-1).transpose(1, 2), state.sum(dim=(1, 2))


def _spelled_out(problem: Problem) -> Problem:
    """The problem with a write of ones and a state of zeros."""
    v = problem.v
    state = v.new_zeros(v.shape[0], *v.shape[-2:], problem.q.shape[-1])
    return replace(problem, write=v.new_ones(v.shape[:-1]), initial_state=state)


def _replace_future(present: int, axes: Axes, x: Tensor) -> Tensor:
    """Other values in range from token ``present`` on: what other tokens hold, scaled where that stays in range."""
    if axes.token is None:
        return x
    past, future = x.split([present, x.shape[axes.token] - present], dim=axes.token)
    future = future.roll(1, dims=axes.head) if axes.head is not None else future
    future = 40 * future if axes.is_log_decay else -future if axes.is_unit else 0.5 * future
    return torch.cat([past, future], dim=axes.token)


def _past(run: Run, problem: Problem, present: int) -> dict[str, Tensor]:
    """Outputs and gradients of the first ``present`` tokens, for a loss on those outputs."""
    leaves, per_token = problem.leaves(), problem.q.shape[:2]
    output = run(leaves).output[:, :present]
    grads = gradients([output], leaves.tensors(), seed=6)
    past = {name: x[:, :present] if x.shape[:2] == per_token else x for name, x in grads.items()}
    return {"output": output.detach()} | past


def _expect_permutation(recurrence: Recurrence, axis: Callable[[Axes], int | None]) -> None:
    """With one axis of every input reversed, outputs and gradients come out reversed, as closely as rounding allows."""
    problem = recurrence.problem()

    def reverse(axes: Axes, x: Tensor) -> Tensor:
        place = axis(axes)
        return x if place is None else x.flip(place)

    def reverse_results(output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return reverse(Axes(0, 1, 2), output), reverse(Axes(0, None, 1), state)

    for run in recurrence.runs():
        reference = run if recurrence.dtype == torch.float64 else definition
        recurrence.expect_equivalent([around(run, before=_each(reverse), after=reverse_results)], reference, problem)
