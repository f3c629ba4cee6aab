"""Gradients of the delta family, for all chunks at once, from what the scans left: S and dS at borders, U, dO and dR.

    dq = (dO S) from_start scale + dA_qk b
    x  = -(dR S) from_start + dA_kk b               da = beta x        dbeta = x^T a
    db = (U dS) to_end + dA_qk^T q + dA_kk^T (beta a)

with dA_qk and dA_kk of ``score_gradients``, which makes dv and dw too. A scalar gate gets what micro-steps i >= t take
from the state, what micro-steps j < t write to it and S total dS here, and there the scores that it lies between.

Work split: one program a (block of K, chunk, head); U, dO and dR are read whole by each. Sums over K (dbeta, the gate)
are written a block at a time. Where a is b their gradients are one. Bytes a micro-step and head, 16-bit, K = V = 128,
C = 64. Floor: q, b, U, dO, dR, S, dS, dA_qk and dA_kk read (2560), dq and db written (512); a read and da written (512)
where a is free. Two blocks of K read U, dO, dR, dA_qk and dA_kk twice (1024 more); b (256) and S (512; 1024 for a gate)
come from the caches again.
Shapes: B T HO HV K V, n micro-steps a token, C chunk.
Oracle: autograd through ``chunk.py``. Source: arXiv:2406.06484 section 3, arXiv:2412.06464 section 3.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans, ceil_div
from statemix.kernels.triton.primitives.gates import SCALAR, load_gate, load_gate_before
from statemix.kernels.triton.primitives.loads import load_scalars, load_sub_step, load_tile, locate_chunk
from statemix.kernels.triton.primitives.sizes import sizes, wide_block

from .score_gradients import ScoreGradients, score_gradients


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "micro_steps"])
def _delta_gradients_kernel(
    q_ptr,  # [tokens, HQ, K]
    a_ptr,  # [micro_steps, HA, K], or None for b
    b_ptr,  # [micro_steps, HB, K]
    u_ptr,  # U, [micro_steps, HV, V]
    grad_ptr,  # dO, [tokens, HO, V]
    dR_ptr,  # dR, [micro_steps, HV, V]
    erase_beta_ptr,  # [micro_steps, HV], or None for 1
    gate_ptr,  # None | [2, HV, micro_steps] of cumulative_gate
    dA_qk_ptr,  # transposed, [chunks, HV, C, C]
    dA_kk_ptr,  # transposed, [chunks, HV, C, C]
    states_ptr,  # S at chunk starts, [chunks, HV, K, V]
    grad_states_ptr,  # dS at chunk ends, [chunks, HV, K, V]
    dq_ptr,  # [tokens, HV, K]
    da_ptr,  # [micro_steps, HV, K]; None where a is b
    db_ptr,  # [micro_steps, HV, K]
    d_erase_beta_ptr,  # None | [blocks of K, micro_steps, HV] float32
    dgate_ptr,  # None | [blocks of K, tokens, HV] float32: all but what scores give
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    micro_steps,
    HQ: tl.constexpr,
    HA: tl.constexpr,
    HB: tl.constexpr,
    HO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SUB_STEPS: tl.constexpr,
    DECAY: tl.constexpr,
    READS_BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """36 parameters: twelve inputs, five gradients and their sizes: they share products and states."""
    BLOCKS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    block = pid % BLOCKS_K
    head = ((pid // BLOCKS_K) % HV).to(tl.int64)
    start, end, chunk = locate_chunk(pid // (BLOCKS_K * HV), chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    count = (end - start).to(tl.int32)
    valid = steps < count
    micro_step = start + steps
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = columns < K
    dtype: tl.constexpr = b_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    not_earlier = steps[:, None] >= steps[None, :]
    later, before = steps[:, None] > steps[None, :], steps[:, None] < steps[None, :]
    dA_place = (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]

    q_ptr += head // (HV // HQ) * K
    b_ptr += (start * HB + head // (HV // HB)) * K
    grad_ptr += head // (HV // HO) * V
    u_ptr += (start * HV + head) * V
    dR_ptr += (start * HV + head) * V
    row_offsets = ((start * HV + head) * K) + steps[:, None] * (HV * K) + columns[None, :]
    state_offset = (chunk * HV + head) * K * V + columns[:, None] * V
    mask = valid[:, None] & mask_k[None, :]

    # queries
    q = load_sub_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, SUB_STEPS, SUB_STEPS - 1)
    b = load_tile(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
    dA = tl.load(dA_qk_ptr + dA_place)
    dq = tl.dot(tl.trans(dA), b, input_precision=PRECISION)
    db = tl.dot(dA, q, input_precision=PRECISION)
    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for part in tl.static_range(BLOCKS_V):
        v_columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = mask_k[:, None] & (v_columns < V)[None, :]
        grad = load_sub_step(grad_ptr, start, steps, valid, v_columns, HO * V, V, BLOCK_V, SUB_STEPS, SUB_STEPS - 1)
        state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(grad, tl.trans(state), from_state, input_precision=PRECISION)
    from_state *= scale
    if DECAY == SCALAR:
        high, _, _, _ = load_gate(gate_ptr, start, head, steps, count, micro_steps, HV)
        from_state *= tl.exp2(high)[:, None]
    dq += from_state
    if dgate_ptr is not None:
        read = tl.sum(q * from_state, axis=1)
    mask_reads = mask
    if SUB_STEPS > 1:
        mask_reads = mask & (micro_step % SUB_STEPS == SUB_STEPS - 1)[:, None]
    dq_place = dq_ptr + ((micro_step // SUB_STEPS) * HV + head)[:, None] * K + columns[None, :]
    tl.store(dq_place, dq.to(dtype), mask=mask_reads)

    # erase directions; b and the gate are loaded anew: kept from above, they would spill
    b = load_tile(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
    if a_ptr is not None:
        a = load_tile(a_ptr + (start * HA + head // (HV // HA)) * K, steps, valid, columns, HA * K, K, BLOCK_K)
    else:
        a = b
    dA = tl.load(dA_kk_ptr + dA_place)
    da = tl.dot(tl.trans(dA), b, input_precision=PRECISION)
    erase_beta = tl.full([CHUNK], 1.0, tl.float32)
    if erase_beta_ptr is not None:
        erase_beta = load_scalars(erase_beta_ptr + start * HV + head, steps, valid, HV)
        dA = (dA * erase_beta[None, :]).to(dtype)
    db = tl.dot(dA, a, db, input_precision=PRECISION)
    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for part in tl.static_range(BLOCKS_V):
        v_columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = mask_k[:, None] & (v_columns < V)[None, :]
        dR = load_tile(dR_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(dR, tl.trans(state), from_state, input_precision=PRECISION)
    if DECAY == SCALAR:
        if READS_BEFORE:
            high, _ = load_gate_before(gate_ptr, start, head, steps, count, micro_steps, HV)
        else:
            high, _, _, _ = load_gate(gate_ptr, start, head, steps, count, micro_steps, HV)
        from_state *= tl.exp2(high)[:, None]
    da -= from_state
    if dgate_ptr is not None:
        erased = tl.sum(a * from_state, axis=1) * erase_beta
    if d_erase_beta_ptr is not None:
        tl.store(
            d_erase_beta_ptr + (block.to(tl.int64) * micro_steps + micro_step) * HV + head,
            tl.sum(a * da, axis=1),
            mask=valid,
        )
    da *= erase_beta[:, None]
    if da_ptr is not None:
        tl.store(da_ptr + row_offsets, da.to(dtype), mask=mask)
    else:
        db += da

    # keys
    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    state_dot = tl.zeros([BLOCK_K], dtype=tl.float32)
    for part in tl.static_range(BLOCKS_V):
        v_columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = mask_k[:, None] & (v_columns < V)[None, :]
        u = load_tile(u_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        grad_state = tl.load(grad_states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(u, tl.trans(grad_state), from_state, input_precision=PRECISION)
        if dgate_ptr is not None:
            state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
            state_dot += tl.sum(grad_state.to(tl.float32) * state, axis=1)
    total = 1.0
    if DECAY == SCALAR:
        high, low, high_end, low_end = load_gate(gate_ptr, start, head, steps, count, micro_steps, HV)
        total, to_end = tl.exp2(high_end), high_end - high
        if EXACT:
            to_end += low_end - low
        from_state *= tl.exp2(to_end)[:, None]
    db += from_state
    tl.store(db_ptr + row_offsets, db.to(dtype), mask=mask)
    if dgate_ptr is not None:
        # micro-steps i >= t meet the state, micro-steps j < t write to it
        if READS_BEFORE:
            met = tl.where(not_earlier, read[:, None], 0.0) - tl.where(later, erased[:, None], 0.0)
        else:
            met = tl.where(not_earlier, (read - erased)[:, None], 0.0)
        met += tl.where(before, tl.sum(b * from_state, axis=1)[:, None], 0.0)
        dgate = tl.sum(met, axis=0) + total * tl.sum(state_dot, axis=0)
        mask_gate = valid
        if SUB_STEPS > 1:
            mask_gate = valid & (micro_step % SUB_STEPS == 0)
        place = dgate_ptr + (block.to(tl.int64) * (micro_steps // SUB_STEPS) + micro_step // SUB_STEPS) * HV + head
        tl.store(place, dgate, mask=mask_gate)


class HeadGradients(NamedTuple):
    """Gradients a head with a state, before sums over heads that share a key or a value, and over tiles of K.

    Attributes:
        q: [B, T, HV, K].
        a: [B, T n, HV, K], or None where it is part of b.
        b: [B, T n, HV, K].
        v: [B, T n, HV, V].
        erase_beta: None or [blocks, B T n, HV] float32.
        write: None or [B, T n, HV] in the dtype of w.
        gate: None, [parts, B T, HV] or [B, T, HV, K], float32.
    """

    q: Tensor
    a: Tensor | None
    b: Tensor
    v: Tensor
    erase_beta: Tensor | None
    write: Tensor | None
    gate: Tensor | None

    @classmethod
    def unwritten(
        cls, operands: ScanOperands, scores: ScoreGradients, gate: Tensor | None, chunks: Spans, blocks: int
    ) -> "HeadGradients":
        """With v and write from ``scores``, and zeros for micro-steps of no document."""
        q, a, b, *_ = operands
        heads, key_dim, micro_steps = operands.num_heads, q.shape[-1], b.shape[0] * b.shape[1]
        dq = chunks.array_like(q, *q.shape[:2], heads, key_dim)
        da = None if a is None else chunks.array_like(b, *b.shape[:2], heads, key_dim)
        db, d_erase_beta = chunks.array_like(b, *b.shape[:2], heads, key_dim), None
        if operands.erase_beta is not None:
            d_erase_beta = chunks.array_like(q, blocks, micro_steps, heads, dtype=torch.float32)
        return cls(dq, da, db, scores.v, d_erase_beta, scores.write, gate)


def delta_gradients(
    operands: ScanOperands,
    grad: Tensor,
    u: Tensor,
    dR: Tensor,
    gate: Tensor | None,
    states: Tensor,
    grad_states: Tensor,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    score_tiles: Tiles,
    score_registers: int | None,
    needs_gate: bool,
) -> HeadGradients:
    """Gradients without a diagonal decay; micro-steps of no document get zeros. dR becomes dv where w is 1."""
    q, a, b, _, erase_beta, *_ = operands
    (batch, length, heads, value_dim), tokens = u.shape, q.shape[0] * q.shape[1]
    blocks = ceil_div(q.shape[-1], tiles.block)
    d_gate = chunks.array_like(q, blocks + 1, tokens, heads, dtype=torch.float32) if needs_gate else None
    constants = sizes(operands, chunks)
    scores = score_gradients(
        *(operands, grad, u, dR, gate, chunks, constants),
        scale=scale,
        tiles=score_tiles,
        max_registers=score_registers,
        dgate=None if d_gate is None else d_gate[blocks],
    )
    grads = HeadGradients.unwritten(operands, scores, d_gate, chunks, blocks)
    inputs = (q, a, b, u, grad, dR, erase_beta, gate, scores.dA_qk, scores.dA_kk, states, grad_states)
    outputs = (grads.q, grads.a, grads.b, grads.erase_beta, d_gate)
    # with a gate registers are short in any case; otherwise narrow blocks leave room for a third program
    block_v = tiles.block if gate is None else wide_block(tiles, value_dim)
    launch(
        _delta_gradients_kernel,
        (chunks.count * heads * blocks,),
        (*inputs, *outputs, *chunks.place(scale), batch * length),
        {**constants, "BLOCK_K": tiles.block, "BLOCK_V": block_v},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return grads
