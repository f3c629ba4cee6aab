"""The chunk form in torch: matrix products inside a chunk, a short walk between chunks.

Rows i, j are the micro-steps of one chunk, tau(i) the token of row i, S0 the state at its start:

    A_ij = a_i^T e^{L} b_j  (j < i)        P_tj = q_t^T e^{L} b_j  (tau(j) <= t)
    (I + A) U = V - (a reach) S0^T         O = (q reach) S0^T + P U         S1 = S0 total + U^T (b rest)

with the decays of ``decay.py``. Without erasures A = 0 and U = V. The triangular solve is exact for equal keys and
beta = 2, where powers of A would reach 1e20. States exist at chunk starts only, never for every token.
Works on any device in float32 (float64 for float64 inputs) and is differentiable by autograd.

Shapes: X chunks, C tokens a chunk, N micro-steps a token, H heads (HV times blocks), K key_dim of a block, V value_dim.
Source: arXiv:2406.06484 section 3.2, arXiv:2312.06635 section 4.
"""

import torch
from torch import Tensor

from .chunk_layout import ChunkLayout, batch_layout, packed_layout
from .decay import ChunkProducts, chunk_products
from .normal_form import MicroSteps, expand_heads
from .spans import power_of_2_from


def chunk_scan(
    q: Tensor,
    steps: MicroSteps,
    initial_state: Tensor,
    *,
    scale: float,
    chunk_size: int,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of ``steps`` in chunks.

    Args:
        q: [B, T, H, K]; every tensor has the dtype to compute in.
        steps: the micro-steps; see ``MicroSteps``.
        initial_state: [B or N, HV, V, K].
        scale: factor on the output.
        chunk_size: C, a power of two.
        cu_seqlens: [N + 1] offsets of packed documents, then B = 1.

    Returns:
        output [B, T, HV, V] and final state [B or N, HV, V, K], in that dtype.
    """
    batch, seq_len = q.shape[:2]
    longest = seq_len if cu_seqlens is None else max(int(cu_seqlens.diff().max()), 1)
    chunk_size = min(chunk_size, power_of_2_from(longest))
    if cu_seqlens is None:
        layout = batch_layout(batch, seq_len, chunk_size)
    else:
        layout = packed_layout(cu_seqlens, seq_len, chunk_size)
    state = fold_key(initial_state, steps.blocks).movedim(-2, 2).flatten(1, 2)  # [N, H, V, K]
    output, state = _scan_chunks(*_rows_by_head(q * scale, steps, layout), state, layout, steps)
    output = layout.join(output.transpose(1, 2)).unflatten(2, (-1, steps.blocks)).sum(3)
    state = state.unflatten(1, (-1, steps.blocks)).movedim(2, -2).flatten(-2, -1)
    return output, state


def _rows_by_head(
    q: Tensor, steps: MicroSteps, layout: ChunkLayout
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """q, v, a, b, log_decay with key heads repeated, blocks as heads and chunks in front: [X, H, C, N, K or V]."""
    num_value_heads, blocks = steps.value.shape[3], steps.blocks

    def by_head(x: Tensor) -> Tensor:  # [B, T, N, HV, blocks, D] -> [X, H, C, N, D]
        return layout.split(x.flatten(3, 4)).movedim(3, 1)

    def keys(x: Tensor) -> Tensor:
        return by_head(fold_key(expand_heads(x, num_value_heads, dim=3), blocks))

    value = steps.value
    if value.ndim == 5:
        value = value.unsqueeze(4).expand(*value.shape[:4], blocks, value.shape[-1])
    read = None if steps.read is None else keys(steps.read)
    log_decay = None
    if steps.log_decay is not None:
        per_block = decay_per_block(steps.log_decay, blocks, steps.key.shape[-1])
        per_block = per_block.expand(*q.shape[:2], *per_block.shape[2:])
        log_decay = by_head(per_block.unsqueeze(2)).squeeze(3)
    return keys(q.unsqueeze(2)), by_head(value), read, keys(steps.key), log_decay


def _scan_chunks(
    q: Tensor,
    v: Tensor,
    a: Tensor | None,
    b: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    layout: ChunkLayout,
    steps: MicroSteps,
) -> tuple[Tensor, Tensor]:
    """Output [X, H, C, V] and final state [N, H, V, K]."""
    left = q if a is None else torch.cat([a, q], dim=-2)
    first_reads_before = steps.reads_before_decay and a is not None
    products = chunk_products(left, b, log_decay, first_reads_before=first_reads_before)
    num_rows = left.shape[-2]
    visible = products.pairs.unflatten(-2, (-1, num_rows))[..., -1, :]  # P, [X, H, C, C * N]
    query_reach = products.left_reach[..., -1, :]
    v, key_rest = v.flatten(-3, -2), products.right_rest.flatten(-3, -2)
    if a is None:
        starts, state = _walk_additive(v.mT @ key_rest, products.total, state, layout)
    else:
        value_part, state_part = _solve(products, v, num_rows)
        starts, v, state = _walk_delta(value_part, state_part, key_rest, products.total, state, layout)
    return query_reach @ starts.mT + visible @ v, state


def _solve(products: ChunkProducts, v: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(I + A)^-1 applied to V and to (a reach): U = the first - the second S0^T."""
    pairs = products.pairs.unflatten(-2, (-1, num_rows))[..., :-1, :].flatten(-3, -2)
    read_reach = products.left_reach[..., :-1, :].flatten(-3, -2)
    solved = torch.linalg.solve_triangular(
        pairs.tril(-1), torch.cat([v, read_reach], dim=-1), upper=False, unitriangular=True
    )
    value_part, state_part = solved.split([v.shape[-1], read_reach.shape[-1]], dim=-1)
    return value_part, state_part


def _walk_additive(update: Tensor, total: Tensor | None, state: Tensor, layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    """S <- S total + V^T (b rest), chunk after chunk; the states at chunk starts and the last one."""
    walk = _Walk(state, layout)
    for new, decay in zip(update.split(layout.active), _per_step(total, layout), strict=True):
        state = walk.start(new.shape[0])
        walk.end(new + (state if decay is None else state * decay))
    return walk.starts(), walk.final()


def _walk_delta(
    value_part: Tensor, state_part: Tensor, key_rest: Tensor, total: Tensor | None, state: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """U = value part - (state part) S^T, then S <- S total + U^T (b rest)."""
    walk, corrected = _Walk(state, layout), []
    parts = (x.split(layout.active) for x in (value_part, state_part, key_rest))
    for free, bound, key, decay in zip(*parts, _per_step(total, layout), strict=True):
        state = walk.start(free.shape[0])
        u = free - bound @ state.mT
        corrected.append(u)
        walk.end(u.mT @ key + (state if decay is None else state * decay))
    return walk.starts(), torch.cat(corrected) if corrected else value_part, walk.final()


class _Walk:
    """States of all sequences along time; sequences that have ended keep theirs."""

    def __init__(self, state: Tensor, layout: ChunkLayout) -> None:
        self.order = layout.order
        self.state = state if self.order is None else state.index_select(0, self.order)
        self.ended: list[Tensor] = []
        self.started: list[Tensor] = [self.state[:0]]

    def start(self, num_active: int) -> Tensor:
        if num_active < self.state.shape[0]:
            self.ended.append(self.state[num_active:])
            self.state = self.state[:num_active]
        self.started.append(self.state)
        return self.state

    def end(self, state: Tensor) -> None:
        self.state = state

    def starts(self) -> Tensor:
        return torch.cat(self.started)

    def final(self) -> Tensor:
        final = torch.cat([self.state, *reversed(self.ended)])
        return final if self.order is None else final.index_select(0, self.order.argsort())


def _per_step(total: Tensor | None, layout: ChunkLayout) -> list[Tensor | None]:
    """The chunk decay [X, H, 1 or K] as one factor [N, H, 1, 1 or K] for each step of the walk."""
    if total is None:
        return [None] * len(layout.active)
    return list(total.unsqueeze(-2).split(layout.active))


def fold_key(x: Tensor, blocks: int) -> Tensor:
    """[..., K] -> [..., blocks, K / blocks]."""
    return x.unflatten(-1, (blocks, -1))


def decay_per_block(log_decay: Tensor, blocks: int, key_dim: int) -> Tensor:
    """Any log_decay of the normal form as [B or 1, T or 1, HV, blocks, 1 or K / blocks]."""
    if log_decay.ndim in (1, 3):
        log_decay = log_decay.unsqueeze(-1)
    if log_decay.ndim == 2:
        log_decay = log_decay.unsqueeze(0).unsqueeze(0)
    if log_decay.shape[-1] == key_dim and key_dim != 1:
        return fold_key(log_decay, blocks)
    return log_decay.expand(*log_decay.shape[:-1], blocks).unsqueeze(-1)
