"""Gradients of the delta family, for all chunks at once, from what the walks left: S and dS at borders, U, dO and dR.

    dq = (dO S) reach scale + dP b       x  = -(dR S) reach + dA b        da = r x      dr = x^T a
    db = (U dS) rest + dP^T q + dA^T (r a)

with dP and dA of ``score_gradients``, which makes dv and dw too. A scalar gate gets what rows i >= t take from
the state, what rows j < t write to it and S total dS here, and there the pairs that it lies between.

Work split: one program a (block of K, chunk, head); U, dO and dR are read whole by each. Sums over K (dr, the gate) are
written a block at a time. Where a is b their gradients are one. Bytes a row and head, 16-bit, K = V = 128, C = 64.
Floor: q, b, U, dO, dR, S, dS, dP and dA read (2560), dq and db written (512); a read and da written (512) where a is
free. Two blocks of K read U, dO, dR, dP and dA twice (1024 more); b (256) and S (512; 1024 for a gate) come from the
caches again.
Shapes: B T HO HV K V, n micro-steps a token, R = T n rows, C chunk.
Oracle: autograd through ``chunk.py``. Source: arXiv:2406.06484 section 3, arXiv:2412.06464 section 3.
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
from statemix.kernels.triton.primitives.gates import SCALAR, decay_kind, load_gate, load_gate_before
from statemix.kernels.triton.primitives.loads import load_rows, load_scalars, load_step, locate_chunk

from .score_gradients import pair_gradients


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "rows"])
def _delta_gradients_kernel(
    q_ptr,  # [tokens, HQ, K]
    a_ptr,  # [rows, HA, K], or None for b
    b_ptr,  # [rows, HB, K]
    corrected_ptr,  # U, [rows, HV, V]
    grad_ptr,  # dO, [tokens, HO, V]
    residual_ptr,  # dR, [rows, HV, V]
    rate_ptr,  # [rows, HV], or None for 1
    gate_ptr,  # None | [2, HV, rows] of cumulative_gate
    reads_ptr,  # dP^T, [chunks, HV, C, C]
    erasures_ptr,  # dA^T, [chunks, HV, C, C]
    states_ptr,  # S at chunk starts, [chunks, HV, K, V]
    grad_states_ptr,  # dS at chunk ends, [chunks, HV, K, V]
    dq_ptr,  # [tokens, HV, K]
    da_ptr,  # [rows, HV, K]; None where a is b
    db_ptr,  # [rows, HV, K]
    drate_ptr,  # None | [blocks of K, rows, HV] float32
    dgate_ptr,  # None | [blocks of K, tokens, HV] float32: all but what pairs of rows give
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    rows,
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
    STEPS: tl.constexpr,
    DECAY: tl.constexpr,
    READS_BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
    row = start + steps
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = columns < K
    dtype: tl.constexpr = b_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    not_earlier = steps[:, None] >= steps[None, :]
    later, before = steps[:, None] > steps[None, :], steps[:, None] < steps[None, :]
    pairs_place = (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]

    q_ptr += head // (HV // HQ) * K
    b_ptr += (start * HB + head // (HV // HB)) * K
    grad_ptr += head // (HV // HO) * V
    corrected_ptr += (start * HV + head) * V
    residual_ptr += (start * HV + head) * V
    row_offsets = ((start * HV + head) * K) + steps[:, None] * (HV * K) + columns[None, :]
    state_offset = (chunk * HV + head) * K * V + columns[:, None] * V
    mask = valid[:, None] & mask_k[None, :]

    # queries
    q = load_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, STEPS, STEPS - 1)
    b = load_rows(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
    pairs = tl.load(reads_ptr + pairs_place)
    dq = tl.dot(tl.trans(pairs), b, input_precision=PRECISION)
    db = tl.dot(pairs, q, input_precision=PRECISION)
    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for part in tl.static_range(BLOCKS_V):
        v_columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = mask_k[:, None] & (v_columns < V)[None, :]
        grad = load_step(grad_ptr, start, steps, valid, v_columns, HO * V, V, BLOCK_V, STEPS, STEPS - 1)
        state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(grad, tl.trans(state), from_state, input_precision=PRECISION)
    from_state *= scale
    if DECAY == SCALAR:
        high, _, _, _ = load_gate(gate_ptr, start, head, steps, count, rows, HV)
        from_state *= tl.exp2(high)[:, None]
    dq += from_state
    if dgate_ptr is not None:
        read = tl.sum(q * from_state, axis=1)
    mask_reads = mask
    if STEPS > 1:
        mask_reads = mask & (row % STEPS == STEPS - 1)[:, None]
    dq_place = dq_ptr + ((row // STEPS) * HV + head)[:, None] * K + columns[None, :]
    tl.store(dq_place, dq.to(dtype), mask=mask_reads)

    # erasures; b and the gate are loaded anew: kept from above, they would spill
    b = load_rows(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
    if a_ptr is not None:
        a = load_rows(a_ptr + (start * HA + head // (HV // HA)) * K, steps, valid, columns, HA * K, K, BLOCK_K)
    else:
        a = b
    pairs = tl.load(erasures_ptr + pairs_place)
    da = tl.dot(tl.trans(pairs), b, input_precision=PRECISION)
    rate = tl.full([CHUNK], 1.0, tl.float32)
    if rate_ptr is not None:
        rate = load_scalars(rate_ptr + start * HV + head, steps, valid, HV)
        pairs = (pairs * rate[None, :]).to(dtype)
    db = tl.dot(pairs, a, db, input_precision=PRECISION)
    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for part in tl.static_range(BLOCKS_V):
        v_columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = mask_k[:, None] & (v_columns < V)[None, :]
        residual = load_rows(residual_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(residual, tl.trans(state), from_state, input_precision=PRECISION)
    if DECAY == SCALAR:
        if READS_BEFORE:
            high, _ = load_gate_before(gate_ptr, start, head, steps, count, rows, HV)
        else:
            high, _, _, _ = load_gate(gate_ptr, start, head, steps, count, rows, HV)
        from_state *= tl.exp2(high)[:, None]
    da -= from_state
    if dgate_ptr is not None:
        erased = tl.sum(a * from_state, axis=1) * rate
    if drate_ptr is not None:
        tl.store(drate_ptr + (block.to(tl.int64) * rows + row) * HV + head, tl.sum(a * da, axis=1), mask=valid)
    da *= rate[:, None]
    if da_ptr is not None:
        tl.store(da_ptr + row_offsets, da.to(dtype), mask=mask)
    else:
        db += da

    # keys
    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    kept = tl.zeros([BLOCK_K], dtype=tl.float32)
    for part in tl.static_range(BLOCKS_V):
        v_columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = mask_k[:, None] & (v_columns < V)[None, :]
        u = load_rows(corrected_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        grad_state = tl.load(grad_states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(u, tl.trans(grad_state), from_state, input_precision=PRECISION)
        if dgate_ptr is not None:
            state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
            kept += tl.sum(grad_state.to(tl.float32) * state, axis=1)
    total = 1.0
    if DECAY == SCALAR:
        high, low, high_end, low_end = load_gate(gate_ptr, start, head, steps, count, rows, HV)
        total, rest = tl.exp2(high_end), high_end - high
        if EXACT:
            rest += low_end - low
        from_state *= tl.exp2(rest)[:, None]
    db += from_state
    tl.store(db_ptr + row_offsets, db.to(dtype), mask=mask)
    if dgate_ptr is not None:
        # rows i >= t meet the state, rows j < t write to it
        if READS_BEFORE:
            met = tl.where(not_earlier, read[:, None], 0.0) - tl.where(later, erased[:, None], 0.0)
        else:
            met = tl.where(not_earlier, (read - erased)[:, None], 0.0)
        met += tl.where(before, tl.sum(b * from_state, axis=1)[:, None], 0.0)
        dgate = tl.sum(met, axis=0) + total * tl.sum(kept, axis=0)
        mask_gate = valid
        if STEPS > 1:
            mask_gate = valid & (row % STEPS == 0)
        place = dgate_ptr + (block.to(tl.int64) * (rows // STEPS) + row // STEPS) * HV + head
        tl.store(place, dgate, mask=mask_gate)


class RowGradients(NamedTuple):
    """Gradients a head with a state, before sums over heads that share a key or a value, and over tiles of K.

    Attributes:
        q: [B, T, HV, K].
        a: [B, R, HV, K], or None where it is part of b.
        b: [B, R, HV, K].
        v: [B, R, HV, V].
        rate: None or [blocks, B R, HV] float32.
        weight: None or [B, R, HV] in the dtype of w.
        gate: None, [parts, B T, HV] or [B, T, HV, K], float32.
    """

    q: Tensor
    a: Tensor | None
    b: Tensor
    v: Tensor
    rate: Tensor | None
    weight: Tensor | None
    gate: Tensor | None


def delta_gradients(
    operands: ScanOperands,
    grad: Tensor,
    corrected: Tensor,
    residual: Tensor,
    gate: Tensor | None,
    states: Tensor,
    grad_states: Tensor,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    pair_tiles: Tiles,
    pair_registers: int | None,
    needs_gate: bool,
) -> RowGradients:
    """Gradients of every row without a diagonal decay; rows of no document get zeros. dR becomes dv where w is 1."""
    q, a, b, v, rate, *_ = operands
    (batch, num_rows, heads, value_dim), key_dim, steps = corrected.shape, q.shape[-1], operands.num_steps
    block_k = block_v = tiles.block
    if gate is not None:  # registers are then short in any case; otherwise narrow blocks leave room for a third program
        block_v = min(2 * block_k, max(block_k, power_of_2_from(value_dim)))
    blocks = ceil_div(key_dim, block_k)
    total = batch * num_rows
    d_gate = chunks.rows_like(q, blocks + 1, total // steps, heads, dtype=torch.float32) if needs_gate else None
    pairs = pair_gradients(
        *(operands, grad, corrected, residual, gate, chunks),
        scale=scale,
        tiles=pair_tiles,
        max_registers=pair_registers,
        dgate=None if d_gate is None else d_gate[blocks],
    )
    made = RowGradients(
        chunks.rows_like(q, batch, num_rows // steps, heads, key_dim),
        None if a is None else chunks.rows_like(b, batch, num_rows, heads, key_dim),
        chunks.rows_like(b, batch, num_rows, heads, key_dim),
        pairs.v,
        None if rate is None else chunks.rows_like(q, blocks, total, heads, dtype=torch.float32),
        pairs.weight,
        d_gate,
    )
    launch(
        _delta_gradients_kernel,
        (chunks.count * heads * blocks,),
        (
            *(q, a, b, corrected, grad, residual, rate, gate, pairs.reads, pairs.erasures, states, grad_states),
            *(made.q, made.a, made.b, made.rate, d_gate),
            chunks.table,
            scale,
            chunks.seq_len,
            chunks.per_sequence,
            total,
        ),
        {
            "HQ": q.shape[2],
            "HA": (b if a is None else a).shape[2],
            "HB": b.shape[2],
            "HO": v.shape[2],
            "HV": heads,
            "K": key_dim,
            "V": value_dim,
            "CHUNK": chunks.length,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "STEPS": steps,
            "DECAY": decay_kind(operands.log_decay),
            "READS_BEFORE": operands.reads_before_decay,
            "PRECISION": products_in(q.dtype, device_arch(q.device)),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return made
