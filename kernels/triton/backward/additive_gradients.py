"""Gradients of queries, keys and gates, for all chunks at once, from the states S and dS at the borders of a chunk.

    dq = (dO S) from_start + dA_qk k        dk = (v dS) to_end + dA_qk^T q        dA_qk = scale lower(dO v^T) Gamma

dA_qk^T is computed as a product of its own: a product that was just made and cast must not be transposed into the next
one on Hopper. The gate of token t gets every score that it lies between, scores with the states among them:

    dg_t = sum over tokens i >= t of (q dq - k dA_qk^T q)  +  tokens j < t of k (v dS) to_end  +  S total dS

with dA_qk without its diagonal: the score of a token with itself has no gate, and would swamp the others where decay is
strong. A score of two tokens that are both after t comes twice, with opposite signs and the same factors: what is left
of it is float32's rounding, 1e-6 of the gradients of the gates beside it. (With products of its own for the scores the
kernel took 0.36 ms on an H200 at B8 T2048 H16 D128 instead of 0.29.) A diagonal decay has kernels of its own:
``channel_gradients``.

Work split: one program a (block of K, chunk, head), v and dO are read whole by each. A scalar gate's gradient is a sum
over K: each block writes its part. Bytes a token and head, 16-bit, K = V = 128, C = 64: reads q, k, v, dO, S, dS
(2048), writes dq, dk (512). Shapes: B T HV K V, C chunk.
Oracle: autograd through ``chunk.py``. Source: arXiv:2312.06635 section 4, arXiv:2405.21060 section 6.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans, ceil_div
from statemix.kernels.triton.primitives.gates import FIXED, NO_DECAY, SCALAR, between, bounded, load_gate
from statemix.kernels.triton.primitives.loads import load_tile, locate_chunk
from statemix.kernels.triton.primitives.sizes import sizes, wide_block


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "tokens"])
def _additive_gradients_kernel(
    q_ptr,  # [tokens, HQ, K]
    k_ptr,  # [tokens, HB, K]
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
    HB: tl.constexpr,
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
    earlier = steps[:, None] >= steps[None, :]  # rows of dA_qk are queries, columns keys

    q_ptr += (start * HQ + head // (HV // HQ)) * K
    k_ptr += (start * HB + head // (HV // HB)) * K
    v_ptr += (start * HV + head) * V
    grad_ptr += (start * HV + head) * V
    row = (start * HV + head) * K  # of the arrays with a vector for every value head
    state_offset = (chunk * HV + head) * K * V + columns[:, None] * V
    dA_qk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dA_qk_t = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block_v in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        v_columns = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
        v = load_tile(v_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        grad = load_tile(grad_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        dA_qk = tl.dot(grad, tl.trans(v), dA_qk, input_precision=PRECISION)
        dA_qk_t = tl.dot(v, tl.trans(grad), dA_qk_t, input_precision=PRECISION)

    q = load_tile(q_ptr, steps, valid, columns, HQ * K, K, BLOCK_K)
    k = load_tile(k_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
    # scores inside the chunk come first and the states last: the other order spills registers
    dA_qk *= scale
    dA_qk_t *= scale
    from_start, to_end = tl.full([CHUNK, 1], 1.0, tl.float32), tl.full([CHUNK, 1], 1.0, tl.float32)
    total = 1.0
    if DECAY == FIXED:
        gamma = bounded(tl.load(gate_ptr + head).to(tl.float32))
        from_start, total = tl.exp2(gamma * (steps + 1))[:, None], tl.exp2(gamma * count)
        to_end = tl.exp2(gamma * tl.maximum(count - 1 - steps, 0))[:, None]
        lag = gamma * (steps[:, None] - steps[None, :])
    elif DECAY == SCALAR:
        high, low, high_end, low_end = load_gate(gate_ptr, start, head, steps, count, tokens, HV)
        from_start, total = tl.exp2(high)[:, None], tl.exp2(high_end)
        lag, to_end = between(high, low, high, low, EXACT), high_end - high
        if EXACT:
            to_end += low_end - low
        to_end = tl.exp2(to_end)[:, None]
    if DECAY == NO_DECAY:
        dA_qk = tl.where(earlier, dA_qk, 0.0)
        dA_qk_t = tl.where(steps[:, None] <= steps[None, :], dA_qk_t, 0.0)
    else:
        # the score of a token with itself has no gate, and would swamp the others where decay is strong
        diagonal = tl.sum(tl.where(steps[:, None] == steps[None, :], dA_qk, 0.0), axis=1)[:, None]
        before = steps[:, None] < steps[None, :]
        dA_qk *= tl.exp2(tl.where(steps[:, None] > steps[None, :], lag, -float("inf")))
        dA_qk_t *= tl.exp2(tl.where(before, -lag, -float("inf")))
    dq = tl.dot(dA_qk.to(dtype), k, input_precision=PRECISION)
    dk = tl.dot(dA_qk_t.to(dtype), q, input_precision=PRECISION)
    if dgate_ptr is not None:
        # of the scores that a gate lies between: over the tokens from it on what they read less what they wrote
        met = tl.sum(q * dq, axis=1) - tl.sum(k * dk, axis=1)
    if DECAY != NO_DECAY:
        dq += diagonal * k
        dk += diagonal * q

    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    state_dot = tl.zeros([BLOCK_K, BLOCK_K], dtype=tl.float32)  # its diagonal is the sum over V of S dS
    for block_v in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        v_columns = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = (columns < K)[:, None] & (v_columns < V)[None, :]
        grad = load_tile(grad_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(grad, tl.trans(state), from_state, input_precision=PRECISION)
    from_state *= from_start * scale
    dq += from_state
    if dgate_ptr is not None:
        met += tl.sum(q * from_state, axis=1)

    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for block_v in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        v_columns = block_v * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = (columns < K)[:, None] & (v_columns < V)[None, :]
        v = load_tile(v_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        grad_state = tl.load(grad_states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(v, tl.trans(grad_state), from_state, input_precision=PRECISION)
        if dgate_ptr is not None:
            state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
            state_dot = tl.dot(grad_state, tl.trans(state), state_dot, input_precision=PRECISION)
    from_state *= to_end
    dk += from_state
    if dgate_ptr is not None:
        channels = tl.arange(0, BLOCK_K)
        # a sum of a sum over one axis would stop the compiler for Blackwell
        state_dot = tl.sum(tl.where(channels[:, None] == channels[None, :], state_dot, 0.0))
        dgate = tl.sum(tl.where(earlier, met[:, None], 0.0), axis=0)
        dgate += tl.sum(tl.where(before, tl.sum(k * from_state, axis=1)[:, None], 0.0), axis=0)
        dgate += total * state_dot

    mask = valid[:, None]
    if K % BLOCK_K != 0:
        mask = mask & (columns < K)[None, :]
    offsets = row + steps[:, None] * (HV * K) + columns[None, :]
    tl.store(dq_ptr + offsets, dq.to(dtype), mask=mask)
    tl.store(dk_ptr + offsets, dk.to(dtype), mask=mask)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + (block * HV + head) * tokens + start + steps, dgate, mask=valid)


def additive_gradients(
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
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dq and dk [B, T, HV, K], and dgate [blocks of K, HV, tokens] float32 or None; zeros for tokens of no document."""
    q, k, v = operands.q, operands.b, operands.v
    (batch, seq_len, heads, value_dim), key_dim = v.shape, q.shape[-1]
    blocks, tokens = ceil_div(key_dim, tiles.block), batch * seq_len
    dq, dk = (chunks.array_like(q, batch, seq_len, heads, key_dim) for _ in range(2))
    dgate = chunks.array_like(q, blocks, heads, tokens, dtype=torch.float32) if needs_gate else None
    args = (q, k, v, grad, gate, states, grad_states, dq, dk, dgate, *chunks.place(scale), tokens)
    blocks_of = {"BLOCK_K": tiles.block, "BLOCK_V": wide_block(tiles, value_dim)}
    constants = sizes(operands, chunks) | blocks_of
    grid = (chunks.count * heads * blocks,)
    launch(_additive_gradients_kernel, grid, args, constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    return dq, dk, dgate
