"""Checks of M_t itself: what ``apply``, ``materialize`` and the declared spectrum say must be one matrix."""

import torch
from torch import Tensor

from statemix.harness.check import CheckFailure, check
from statemix.harness.problem import Problem
from statemix.kernels import Segment, merge
from statemix.transitions import segment_summary

from .recurrence import Recurrence


@check("apply returns a state: same shape and dtype, and leaves its argument alone", needs=["float64"])
def apply_keeps_the_shape(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    state = _states(problem)
    before = state.clone()
    changed = problem.transition.apply(state)
    if changed.shape != state.shape or changed.dtype != state.dtype:
        raise CheckFailure(
            f"apply: expected {list(state.shape)} {state.dtype}, got {list(changed.shape)} {changed.dtype}"
        )
    if not torch.equal(state, before):
        raise CheckFailure("apply: expected the state passed in to stay as it was; return a new tensor")


@check("apply is linear in the state: M_t may not depend on S", needs=["float64"])
def apply_is_linear(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    x, y = _states(problem), _states(problem, seed=5)
    low = problem.to(torch.float32).transition
    exact = 2 * problem.transition.apply(x) - 3 * problem.transition.apply(y)
    low_sum = 2 * low.apply(x.float()) - 3 * low.apply(y.float())
    _expect(recurrence, "apply(2 x - 3 y)", problem.transition.apply(2 * x - 3 * y), exact, low_sum)


@check("apply(S) is S @ materialize(): the action and the matrix are one thing", needs=["float64"])
def apply_is_materialize(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    state, low = _states(problem), problem.to(torch.float32)
    exact = state @ matrix_of(problem)
    _expect(recurrence, "apply", problem.transition.apply(state), exact, state.float() @ matrix_of(low))


@check("the measured dS_t / dS_{t-1} of the scan is M_t", needs=["float64"])
def measured_transition_is_declared(recurrence: Recurrence) -> None:
    problem, key_dim = recurrence.problem(seq_len=1), recurrence.sizes.key_dim
    assert problem.initial_state is not None
    basis = torch.eye(key_dim, dtype=torch.float64)
    start = basis.expand(*problem.initial_state.shape[:2], -1, -1).clone().requires_grad_()
    value = problem.v.new_zeros(*problem.v.shape[:-1], key_dim)
    arguments = problem.arguments() | {"v": value, "initial_state": start}
    final = recurrence.scan(**arguments, form="recurrent").final_state
    by_channel = [
        torch.autograd.grad(x.sum(), start, retain_graph=True)[0][..., 0, :] for x in final[..., 0, :].unbind(-1)
    ]
    measured = torch.stack(by_channel, dim=-1)  # d S_t[0, c] / d S_{t-1}[0, :], [B, HV, K, K]
    low = matrix_of(problem.to(torch.float32))[:, 0]
    _expect(recurrence, "d final_state / d initial_state", measured, matrix_of(problem)[:, 0], low)


@check("eigenvalues of M_t lie in the declared interval, or within the declared radius", needs=["float64"])
def spectrum_is_declared(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    transition = problem.transition
    eigenvalues = torch.linalg.eigvals(matrix_of(problem))
    rounding = 1e3 * torch.finfo(torch.float64).eps ** 0.5  # defective matrices: eigenvalues move with the root of eps
    if transition.eigenvalue_range is not None:
        low, high = transition.eigenvalue_range
        if eigenvalues.imag.abs().max() > rounding:
            raise CheckFailure(f"eigenvalue_range: declared real, measured {_furthest(eigenvalues.imag)}i")
        if eigenvalues.real.min() < low - rounding or eigenvalues.real.max() > high + rounding:
            measured = f"[{eigenvalues.real.min():.4g}, {eigenvalues.real.max():.4g}]"
            raise CheckFailure(f"eigenvalue_range: declared [{low:g}, {high:g}], measured {measured}")
    elif transition.spectral_radius is not None and eigenvalues.abs().max() > transition.spectral_radius + rounding:
        raise CheckFailure(
            f"spectral_radius: declared {transition.spectral_radius:g}, measured {eigenvalues.abs().max():.4g}"
        )


@check("tokens, at(t), to, detach and pytree round trips keep the transition what it is", needs=["float64"])
def value_survives_round_trips(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    transition = problem.transition
    leaves, spec = torch.utils._pytree.tree_flatten(transition)
    copies = {
        "pytree": torch.utils._pytree.tree_unflatten(leaves, spec),
        "detach": transition.detach(),
        "to": transition.to(torch.float64),
    }
    matrix = matrix_of(problem)
    for name, copy in copies.items():
        if not torch.equal(copy.materialize(matrix.shape[-1]).to(matrix).expand_as(matrix), matrix):
            raise CheckFailure(f"{name}: expected the same matrix after the round trip")
    state, low = _states(problem), problem.to(torch.float32).transition
    last, exact = transition.at(matrix.shape[1] - 1), transition.apply(state)[:, -1]
    _expect(recurrence, "at(t).apply(state)", last.apply(state[:, -1]), exact, low.apply(state.float())[:, -1])


@check("segment summaries merge associatively and reproduce the scan", needs=["float64"])
def segments_merge(recurrence: Recurrence) -> None:
    problem = recurrence.problem()
    seq_len = recurrence.sizes.seq_len
    if seq_len < 3:
        return
    cuts = [0, seq_len // 3, 2 * seq_len // 3, seq_len]

    def merged(left_first: bool) -> Tensor:
        a, b, c = (_summary(problem.tokens(i, j)) for i, j in zip(cuts, cuts[1:], strict=False))
        whole = merge(merge(a, b), c) if left_first else merge(a, merge(b, c))
        assert problem.initial_state is not None
        return whole.apply(problem.initial_state)

    run = recurrence.run("recurrent")
    exact, low = run(problem).final_state, run(problem.to(torch.float32)).final_state
    for left_first in (True, False):
        _expect(recurrence, "final_state from segments", merged(left_first), exact, low)


def _summary(problem: Problem) -> Segment:
    return segment_summary(problem.k, problem.v, problem.transition, write=problem.write)


def _states(problem: Problem, seed: int = 3) -> Tensor:
    """A random state for every token, [B, T, HV, V, K]."""
    shape = (*problem.q.shape[:2], *problem.v.shape[-2:], problem.q.shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=problem.q.dtype)


def matrix_of(problem: Problem) -> Tensor:
    """Dense M_t, [B, T, HV, K, K]."""
    (batch, seq_len, _, key_dim), num_heads = problem.q.shape, problem.v.shape[-2]
    return problem.transition.materialize(key_dim).to(problem.q).expand(batch, seq_len, num_heads, key_dim, key_dim)


def _furthest(x: Tensor) -> str:
    return f"{x.flatten()[x.abs().argmax()].item():.4g}"


def _expect(recurrence: Recurrence, name: str, got: Tensor, exact: Tensor, low: Tensor) -> None:
    recurrence.expect_close({name: got}, {name: exact}, {name: low})
