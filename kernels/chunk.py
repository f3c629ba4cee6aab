"""The chunk form in torch: matrix products inside a chunk, a short scan between chunks.

i, j are micro-steps of one chunk, tau(i) the token of i, S0 the state at its start:

    A_ij = a_i^T e^{L} b_j  (j < i)        P_tj = q_t^T e^{L} b_j  (tau(j) <= t)
    (I + A) U = V - (a from_start) S0^T         O = (q from_start) S0^T + P U         S1 = S0 total + U^T (b to_end)

with the decays of ``decay.py``. Without erase pairs A = 0 and U = V. The triangular solve is exact for equal keys and
beta = 2, where powers of A would reach 1e20. States exist at chunk starts only, never for every token.
Works on any device in float32 (float64 for float64 inputs) and is differentiable by autograd.

Shapes: X chunks, C tokens a chunk, n micro-steps a token, H heads (of states: HV), K key_dim, V value_dim.
Source: arXiv:2406.06484 section 3.2, arXiv:2312.06635 section 4.
"""

import torch
from torch import Tensor

from .chunk_layout import ChunkLayout, batch_layout, packed_layout
from .decay import ChunkProducts, chunk_products
from .normal_form import expand_heads, with_last_axis
from .operands import ScanOperands
from .spans import power_of_2_from


def chunk_scan(operands: ScanOperands, *, scale: float, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Run the recurrence of ``operands`` in chunks, in their dtype.

    Args:
        scale: factor on the output.
        chunk_size: C, a power of two.

    Returns:
        output [B, T, HO, V] and final state [N, HV, V, K].
    """
    (batch, seq_len), cu_seqlens = operands.q.shape[:2], operands.cu_seqlens
    longest = seq_len if cu_seqlens is None else max(int(cu_seqlens.diff().max()), 1)
    chunk_size = min(chunk_size, power_of_2_from(longest))
    if cu_seqlens is None:
        layout = batch_layout(batch, seq_len, chunk_size)
    else:
        layout = packed_layout(cu_seqlens, seq_len, chunk_size)
    first_reads_before = operands.reads_before_decay and operands.erases
    output, state = _scan_chunks(
        *_by_head(operands, layout, scale), operands.start(), layout, first_reads_before=first_reads_before
    )
    output = layout.join(output.transpose(1, 2))
    return output if operands.blocks == 1 else output.unflatten(2, (-1, operands.blocks)).sum(3), state


def _by_head(
    operands: ScanOperands, layout: ChunkLayout, scale: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """q, v, a, b, log_decay of every head with chunks in front, [X, H, C, n, K or V]: erase beta and write are in."""
    q, a, b, v, beta, write, log_decay, *_ = operands
    heads, num_steps = operands.num_heads, operands.num_steps

    def by_head(x: Tensor, steps: int = num_steps) -> Tensor:  # [B, T n, H', D] -> [X, H, C, n, D]
        x = expand_heads(x, heads, dim=2)
        return layout.split(x.unflatten(1, (-1, steps))).movedim(3, 1)

    if write is not None:
        v = write.unsqueeze(-1) * expand_heads(v, heads, dim=2)
    if operands.erases:
        a = b if a is None else a
        a = a if beta is None else beta.unsqueeze(-1) * expand_heads(a, heads, dim=2)
    if log_decay is not None:
        by_channel = with_last_axis(log_decay)
        by_channel = by_channel.expand(*q.shape[:2], *by_channel.shape[-2:])
        log_decay = by_head(by_channel, 1).squeeze(3)
    return by_head(q * scale, 1), by_head(v), None if a is None else by_head(a), by_head(b), log_decay


def _scan_chunks(
    q: Tensor,
    v: Tensor,
    a: Tensor | None,
    b: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    layout: ChunkLayout,
    *,
    first_reads_before: bool,
) -> tuple[Tensor, Tensor]:
    """Output [X, H, C, V] and final state [N, H, V, K]."""
    left = q if a is None else torch.cat([a, q], dim=-2)
    products = chunk_products(left, b, log_decay, first_reads_before=first_reads_before)
    num_left = left.shape[-2]
    visible = products.pairs.unflatten(-2, (-1, num_left))[..., -1, :]  # P, [X, H, C, C * N]
    query = products.left_from_start[..., -1, :]
    v, key = v.flatten(-3, -2), products.right_to_end.flatten(-3, -2)
    if a is None:
        starts, state = _between_chunks_additive(v.mT @ key, products.total, state, layout)
    else:
        value_part, state_part = _solve(products, v, num_left)
        starts, v, state = _between_chunks_delta(value_part, state_part, key, products.total, state, layout)
    return query @ starts.mT + visible @ v, state


def _solve(products: ChunkProducts, v: Tensor, num_left: int) -> tuple[Tensor, Tensor]:
    """(I + A)^-1 applied to V and to (a from_start): U = the first - the second S0^T."""
    pairs = products.pairs.unflatten(-2, (-1, num_left))[..., :-1, :].flatten(-3, -2)
    read = products.left_from_start[..., :-1, :].flatten(-3, -2)
    solved = torch.linalg.solve_triangular(
        pairs.tril(-1), torch.cat([v, read], dim=-1), upper=False, unitriangular=True
    )
    value_part, state_part = solved.split([v.shape[-1], read.shape[-1]], dim=-1)
    return value_part, state_part


def _between_chunks_additive(
    update: Tensor, total: Tensor | None, state: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor]:
    """S <- S total + V^T (b to_end), chunk after chunk; the states at chunk starts and the last one."""
    states = _States(state, layout)
    for new, decay in zip(update.split(layout.active), _per_step(total, layout), strict=True):
        state = states.start(new.shape[0])
        states.end(new + (state if decay is None else state * decay))
    return states.starts(), states.final()


def _between_chunks_delta(
    value_part: Tensor, state_part: Tensor, key: Tensor, total: Tensor | None, state: Tensor, layout: ChunkLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """U = value part - (state part) S^T, then S <- S total + U^T (b to_end)."""
    states, corrected = _States(state, layout), []
    parts = (x.split(layout.active) for x in (value_part, state_part, key))
    for free, bound, written, decay in zip(*parts, _per_step(total, layout), strict=True):
        state = states.start(free.shape[0])
        u = free - bound @ state.mT
        corrected.append(u)
        states.end(u.mT @ written + (state if decay is None else state * decay))
    return states.starts(), torch.cat(corrected) if corrected else value_part, states.final()


class _States:
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
    """The chunk decay [X, H, 1 or K] as one factor [N, H, 1, 1 or K] for each step of the states."""
    if total is None:
        return [None] * len(layout.active)
    return list(total.unsqueeze(-2).split(layout.active))
