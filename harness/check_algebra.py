"""Checks of M_t itself: what ``apply``, ``materialize`` and the declared spectrum say must be one matrix."""

import torch
from torch import Tensor

from statemix.kernels import Segment, merge
from statemix.transitions import segment_summary

from .allowance import Excess, Reference
from .check import check
from .context import CheckFailure, Context, describe, locate
from .problem import Problem, Sizes


@check("apply returns a state: same shape and dtype, and leaves its argument alone", needs_float64=True)
def apply_keeps_the_shape(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    state = _states(problem, sizes)
    before = state.clone()
    changed = problem.transition.apply(state)
    if changed.shape != state.shape or changed.dtype != state.dtype:
        raise CheckFailure(
            f"apply: expected {list(state.shape)} {state.dtype}, got {list(changed.shape)} {changed.dtype}"
        )
    if not torch.equal(state, before):
        raise CheckFailure("apply: expected the state passed in to stay as it was; return a new tensor")


@check("apply is linear in the state: M_t may not depend on S", needs_float64=True)
def apply_is_linear(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    x, y = _states(problem, sizes), _states(problem, sizes, seed=5)
    low = problem.to(torch.float32).transition
    exact = 2 * problem.transition.apply(x) - 3 * problem.transition.apply(y)
    low_sum = 2 * low.apply(x.float()) - 3 * low.apply(y.float())
    _expect("apply(2 x - 3 y)", problem.transition.apply(2 * x - 3 * y), exact, low_sum)


@check("apply(S) is S @ materialize(): the action and the matrix are one thing", needs_float64=True)
def apply_is_materialize(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    state, low = _states(problem, sizes), problem.to(torch.float32)
    exact = state @ _matrix(problem, sizes)
    _expect("apply", problem.transition.apply(state), exact, state.float() @ _matrix(low, sizes))


@check("the measured dS_t / dS_{t-1} of the scan is M_t", needs_float64=True)
def measured_transition_is_declared(context: Context, sizes: Sizes) -> None:
    problem = context.problem(Sizes(sizes.batch, 1, *sizes_after_time(sizes)))
    basis = torch.eye(sizes.key_dim, dtype=torch.float64)
    start = basis.expand(sizes.batch, sizes.num_value_heads, -1, -1).clone().requires_grad_()
    value = problem.v.new_zeros(*problem.v.shape[:-1], sizes.key_dim)
    arguments = problem.arguments() | {"v": value, "initial_state": start}
    final = context.scan(**arguments, form="recurrent").final_state
    rows = [torch.autograd.grad(final[..., 0, c].sum(), start, retain_graph=True)[0][..., 0, :] for c in _range(sizes)]
    measured = torch.stack(rows, dim=-1)  # d S_t[0, c] / d S_{t-1}[0, :], [B, HV, K, K]
    low = _matrix(problem.to(torch.float32), sizes)[:, 0]
    _expect("d final_state / d initial_state", measured, _matrix(problem, sizes)[:, 0], low)


@check("eigenvalues of M_t lie in the declared interval, or within the declared radius", needs_float64=True)
def spectrum_is_declared(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    transition = problem.transition
    eigenvalues = torch.linalg.eigvals(_matrix(problem, sizes))
    rounding = 1e3 * torch.finfo(torch.float64).eps ** 0.5  # defective matrices: eigenvalues move with the root of eps
    if transition.eigenvalue_range is not None:
        low, high = transition.eigenvalue_range
        if eigenvalues.imag.abs().max() > rounding:
            raise CheckFailure(f"eigenvalue_range: declared real, measured {_furthest(eigenvalues.imag)}i")
        if eigenvalues.real.min() < low - rounding or eigenvalues.real.max() > high + rounding:
            found = f"[{eigenvalues.real.min():.4g}, {eigenvalues.real.max():.4g}]"
            raise CheckFailure(f"eigenvalue_range: declared [{low:g}, {high:g}], measured {found}")
    elif transition.spectral_radius is not None and eigenvalues.abs().max() > transition.spectral_radius + rounding:
        raise CheckFailure(
            f"spectral_radius: declared {transition.spectral_radius:g}, measured {eigenvalues.abs().max():.4g}"
        )


@check("tokens, at(t), to, detach and pytree round trips keep the transition what it is", needs_float64=True)
def value_survives_round_trips(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    transition = problem.transition
    leaves, spec = torch.utils._pytree.tree_flatten(transition)
    copies = {
        "pytree": torch.utils._pytree.tree_unflatten(leaves, spec),
        "detach": transition.detach(),
        "to": transition.to(torch.float64),
    }
    matrix = _matrix(problem, sizes)
    for name, copy in copies.items():
        if not torch.equal(copy.materialize(sizes.key_dim).to(matrix).expand_as(matrix), matrix):
            raise CheckFailure(f"{name}: expected the same matrix after the round trip")
    t = sizes.seq_len - 1
    state = _states(problem, sizes)
    low = problem.to(torch.float32).transition
    _expect(
        "at(t).apply",
        transition.at(t).apply(state[:, t]),
        transition.apply(state)[:, t],
        low.apply(state.float())[:, t],
    )


@check("segment summaries merge associatively and reproduce the scan", needs_float64=True)
def segments_merge(context: Context, sizes: Sizes) -> None:
    problem = context.problem(sizes)
    if sizes.seq_len < 3:
        return
    cuts = [0, sizes.seq_len // 3, 2 * sizes.seq_len // 3, sizes.seq_len]

    def merged(x: Problem, left_first: bool) -> Tensor:
        a, b, c = (_summary(context, x.tokens(i, j)) for i, j in zip(cuts, cuts[1:], strict=False))
        whole = merge(merge(a, b), c) if left_first else merge(a, merge(b, c))
        assert x.initial_state is not None
        return whole.apply(x.initial_state)

    exact = context.run("recurrent")(problem).final_state
    low = context.run("recurrent")(problem.to(torch.float32)).final_state
    for left_first in (True, False):
        _expect("final_state from segments", merged(problem, left_first), exact, low)


def _summary(context: Context, problem: Problem) -> Segment:
    return segment_summary(problem.k, problem.v, problem.transition, write=problem.write)


def sizes_after_time(sizes: Sizes) -> tuple[int, int, int, int]:
    return sizes.num_heads, sizes.num_value_heads, sizes.key_dim, sizes.value_dim


def _range(sizes: Sizes) -> range:
    return range(sizes.key_dim)


def _states(problem: Problem, sizes: Sizes, seed: int = 3) -> Tensor:
    """A random state for every token, [B, T, HV, V, K]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.batch, sizes.seq_len, sizes.num_value_heads, sizes.value_dim, sizes.key_dim)
    return torch.randn(shape, generator=generator, dtype=problem.q.dtype)


def _matrix(problem: Problem, sizes: Sizes) -> Tensor:
    """Dense M_t, [B, T, HV, K, K]."""
    key_dim, lead = problem.q.shape[-1], (*problem.q.shape[:2], sizes.num_value_heads)
    return problem.transition.materialize(key_dim).to(problem.q).expand(*lead, key_dim, key_dim)


def _furthest(x: Tensor) -> str:
    return f"{x.flatten()[x.abs().argmax()].item():.4g}"


def _expect(name: str, got: Tensor, exact: Tensor, low: Tensor) -> None:
    excess = Reference(exact.detach(), low.detach()).excess(got.detach())
    if excess is not None:
        raise CheckFailure(f"{name}{locate('state', Excess(excess.row[:2], 0, 0, ''))}: {describe(excess)}")
