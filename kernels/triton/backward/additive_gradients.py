"""Gradients of queries, keys and gates, for all chunks at once, from the states S and dS at the borders of a chunk.

    dq = (dO S) reach + dP k          dk = (v dS) rest + dP^T q          dP = scale lower(dO v^T) e^L

dP^T is computed as a product of its own: a product that was just made and cast must not be transposed into the next
one on Hopper. The gate of token t gets every pair that it lies between, pairs with the states among them:

    dg_t = sum over rows i >= t of (q dq - k dP^T q)  +  rows s < t of k (v dS) rest  +  S total dS

with dP without its diagonal: the pair of a row with itself has no gate, and would swamp the others where decay is
strong. A pair of rows that are both after t comes twice, with opposite signs and the same factors: what is left of it
is float32's rounding, 1e-6 of the gradients of the gates beside it. (With products of its own for the pairs the kernel
took 0.36 ms on an H200 at B8 T2048 H16 D128 instead of 0.29.) A diagonal decay has kernels of its own:
``channel_gradients``.

Work split: one program a (block of K, chunk, head), v and dO are read whole by each. A scalar gate's gradient is a sum
over K: each block writes its part. Bytes a token and head, 16-bit, K = V = 128, C = 64: reads q, k, v, dO, S, dS
(2048), writes dq, dk (512). Shapes: B T HV K V, C chunk.
Oracle: autograd through ``chunk.py``. Source: arXiv:2312.06635 section 4, arXiv:2405.21060 section 6.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans, ceil_div, power_of_2_from
from statemix.kernels.triton.primitives.gates import FIXED, NO_DECAY, SCALAR, between, bounded, decay_kind, load_gate
from statemix.kernels.triton.primitives.loads import load_rows, locate_chunk


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "tokens"])
def _gradients_kernel(
    q_ptr,  # [tokens, HQ, K]
    k_ptr,  # [tokens, HK, K]
    v_ptr,  # [tokens, HV, V]
    grad_ptr,  # dO, [tokens, HV, V]
    gate_ptr,  # None | [HV] log decay | [2, HV, tokens] of cumulative_gate
    states_ptr,  # S at chunk starts, [chunks, HV, K, V]
    grad_states_ptr,  # dS at chunk ends, [chunks, HV, K, V]
    dq_ptr,  # [tokens, HV, K]
    dk_ptr,  # [tokens, HV, K]
    dgate_ptr,  # None | [blocks of K, HV, tokens] float32
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    tokens,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    block = pid % BLOCKS_K
    head = ((pid // BLOCKS_K) % HV).to(tl.int64)
    start, end, chunk = locate_chunk(pid // (BLOCKS_K * HV), chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    count = (end - start).to(tl.int32)
    valid = steps < count
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    earlier = steps[:, None] >= steps[None, :]  # rows of dP are queries, columns keys

    q_ptr += (start * HQ + head // (HV // HQ)) * K
    k_ptr += (start * HK + head // (HV // HK)) * K
    v_ptr += (start * HV + head) * V
    grad_ptr += (start * HV + head) * V
    row = (start * HV + head) * K  # of the arrays with a row for every value head
    state_offset = (chunk * HV + head) * K * V + columns[:, None] * V
    grad_pairs = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    grad_pairs_t = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block_v in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        v_columns = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
        v = load_rows(v_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        grad = load_rows(grad_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        grad_pairs = tl.dot(grad, tl.trans(v), grad_pairs, input_precision=PRECISION)
        grad_pairs_t = tl.dot(v, tl.trans(grad), grad_pairs_t, input_precision=PRECISION)

    q = load_rows(q_ptr, steps, valid, columns, HQ * K, K, BLOCK_K)
    k = load_rows(k_ptr, steps, valid, columns, HK * K, K, BLOCK_K)
    # pairs inside the chunk come first and the states last: the other order spills registers
    grad_pairs *= scale
    grad_pairs_t *= scale
    reach, rest = tl.full([CHUNK, 1], 1.0, tl.float32), tl.full([CHUNK, 1], 1.0, tl.float32)
    total = 1.0
    if DECAY == FIXED:
        gamma = bounded(tl.load(gate_ptr + head).to(tl.float32))
        reach, total = tl.exp2(gamma * (steps + 1))[:, None], tl.exp2(gamma * count)
        rest = tl.exp2(gamma * tl.maximum(count - 1 - steps, 0))[:, None]
        lag = gamma * (steps[:, None] - steps[None, :])
    elif DECAY == SCALAR:
        high, low, high_end, low_end = load_gate(gate_ptr, start, head, steps, count, tokens, HV)
        reach, total = tl.exp2(high)[:, None], tl.exp2(high_end)
        lag, rest = between(high, low, high, low, EXACT), high_end - high
        if EXACT:
            rest += low_end - low
        rest = tl.exp2(rest)[:, None]
    if DECAY == NO_DECAY:
        grad_pairs = tl.where(earlier, grad_pairs, 0.0)
        grad_pairs_t = tl.where(steps[:, None] <= steps[None, :], grad_pairs_t, 0.0)
    else:
        # the pair of a row with itself has no gate, and would swamp the others where decay is strong
        own = tl.sum(tl.where(steps[:, None] == steps[None, :], grad_pairs, 0.0), axis=1)[:, None]
        before = steps[:, None] < steps[None, :]
        grad_pairs *= tl.exp2(tl.where(steps[:, None] > steps[None, :], lag, -float("inf")))
        grad_pairs_t *= tl.exp2(tl.where(before, -lag, -float("inf")))
    dq = tl.dot(grad_pairs.to(dtype), k, input_precision=PRECISION)
    dk = tl.dot(grad_pairs_t.to(dtype), q, input_precision=PRECISION)
    if dgate_ptr is not None:
        # of the pairs that a gate lies between: over the rows from it on what they read less what they wrote
        met = tl.sum(q * dq, axis=1) - tl.sum(k * dk, axis=1)
    if DECAY != NO_DECAY:
        dq += own * k
        dk += own * q

    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    kept = tl.zeros([BLOCK_K, BLOCK_K], dtype=tl.float32)  # its diagonal is the sum over V of S dS
    for block_v in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        v_columns = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = (columns < K)[:, None] & (v_columns < V)[None, :]
        grad = load_rows(grad_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(grad, tl.trans(state), from_state, input_precision=PRECISION)
    from_state *= reach * scale
    dq += from_state
    if dgate_ptr is not None:
        met += tl.sum(q * from_state, axis=1)

    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for block_v in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        v_columns = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = (columns < K)[:, None] & (v_columns < V)[None, :]
        v = load_rows(v_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        grad_state = tl.load(grad_states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(v, tl.trans(grad_state), from_state, input_precision=PRECISION)
        if dgate_ptr is not None:
            state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
            kept = tl.dot(grad_state, tl.trans(state), kept, input_precision=PRECISION)
    from_state *= rest
    dk += from_state
    if dgate_ptr is not None:
        channels = tl.arange(0, BLOCK_K)
        # a sum of a sum over one axis would stop the compiler for Blackwell
        kept = tl.sum(tl.where(channels[:, None] == channels[None, :], kept, 0.0))
        dgate = tl.sum(tl.where(earlier, met[:, None], 0.0), axis=0)
        dgate += tl.sum(tl.where(before, tl.sum(k * from_state, axis=1)[:, None], 0.0), axis=0)
        dgate += total * kept

    mask = valid[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (columns < K)[None, :]
    offsets = row + steps[:, None] * (HV * K) + columns[None, :]
    tl.store(dq_ptr + offsets, dq.to(dtype), mask=mask)
    tl.store(dk_ptr + offsets, dk.to(dtype), mask=mask)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + (block * HV + head) * tokens + start + steps, dgate, mask=valid)


class Gradients(NamedTuple):
    """dq and dk [B, T, HV, K]; the gate's gradient, float32, or None: [blocks of K, HV, tokens], or [B, T, HV, K]."""

    q: Tensor
    k: Tensor
    gate: Tensor | None


def gradients(
    operands: ScanOperands,
    grad: Tensor,
    gate: Tensor | None,
    states: Tensor,
    grad_states: Tensor,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    needs_gate: bool,
) -> Gradients:
    """Gradients of every query and key, one a value head; tokens of no document get zeros."""
    q, k, v, log_decay = operands.q, operands.b, operands.v, operands.log_decay
    (batch, seq_len, heads, value_dim), key_dim = v.shape, q.shape[-1]
    block_k = tiles.block
    dq, dk = (chunks.rows_like(q, batch, seq_len, heads, key_dim) for _ in range(2))
    dgate = None
    if needs_gate:
        shape = (ceil_div(key_dim, block_k), heads, batch * seq_len)
        dgate = chunks.rows_like(q, *shape, dtype=torch.float32)
    launch(
        _gradients_kernel,
        (chunks.count * heads * ceil_div(key_dim, block_k),),
        (
            *(q, k, v, grad, gate, states, grad_states),
            *(dq, dk, dgate),
            chunks.table,
            scale,
            chunks.seq_len,
            chunks.per_sequence,
            batch * seq_len,
        ),
        {
            "HQ": q.shape[2],
            "HK": k.shape[2],
            "HV": heads,
            "K": key_dim,
            "V": value_dim,
            "CHUNK": chunks.length,
            "BLOCK_K": block_k,
            "BLOCK_V": min(2 * tiles.block, max(tiles.block, power_of_2_from(value_dim))),
            "DECAY": decay_kind(log_decay),
            "PRECISION": products_in(q.dtype, device_arch(q.device)),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return Gradients(dq, dk, dgate)
