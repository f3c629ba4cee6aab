"""Gradients of the delta family, for all chunks at once, from what the walks left: S and dS at borders, U, dO and dR.

    dq = (dO S) reach scale + dP b       x  = -(dR S) reach + dA b        da = r x      dr = x^T a
    db = (U dS) rest + dP^T q + dA^T (r a)

with dP and dA of ``pair_gradients_triton``, which makes dv and dw too. A scalar gate gets the pairs that it lies
between, pairs with the state among them:

    dg_t = sum over rows i >= t of (q dq + r a x - b (dP^T q + dA^T (r a)))  +  rows j < t of b (U dS) rest
           +  total S dS

with dP without its diagonal. A pair of rows that are both after t comes twice, with opposite signs and the same
factors: what is left of it is float32's rounding, 1e-6 of the gradients of the gates beside it. A row that reads before
its own decay leaves its own gate out.

Work split: one program a (block of K, chunk, head); U, dO and dR are read whole by each. Sums over K (dr, the gate) are
written a block at a time; ``finish_sums`` adds them up, and those over rows. With products of its own for the pairs the
gradient of a gate took 0.04 ms more on an H200 at B8 T2048 H16 D128, and the pair kernel 238 registers. Where a is b
their gradients are one. Bytes a row and head, 16-bit, K = V = 128, C = 64. Floor: q, b, U, dO, dR, S, dS, dP and dA
read (2560), dq and db written (512); a read and da written (512) where a is free. Two blocks of K read U, dO, dR, dP
and dA twice (1024 more); b (256) and S (512; 1024 for a gate) come from the caches again.
Shapes: B T HO HV K V, n micro-steps a token, R = T n rows, C chunk.
Oracle: autograd through ``chunk.py``. Source: arXiv:2406.06484 section 3, arXiv:2412.06464 section 3."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .delta_operands import DeltaOperands
from .launch import launch
from .launch_config import Tiles, device_family, products_in
from .pair_gradients_triton import pair_gradients
from .spans import Spans, ceil_div, power_of_2_from
from .tile_triton import (
    SCALAR,
    decay_kind,
    load_gate,
    load_gate_before,
    load_rows,
    load_scalars,
    load_step,
    locate_chunk,
)


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
    own_ptr,  # dP of a row with itself, [rows, HV] float32; None without a decay: it is in dP then
    dgate_ptr,  # None | [2 or 3, blocks of K, rows, HV] float32: of rows, of writes to S, of erasures before the decay
    kept_ptr,  # None | [blocks of K, chunks, HV] float32
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
    if dgate_ptr is not None:
        read = tl.sum(q * dq, axis=1)
    if own_ptr is not None:
        own = load_scalars(own_ptr + start * HV + head, steps, valid, HV)
        dq += own[:, None] * b
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
        read += tl.sum(q * from_state, axis=1)
    mask_reads = mask
    if STEPS > 1:
        mask_reads = mask & (row % STEPS == STEPS - 1)[:, None]
    dq_place = dq_ptr + ((row // STEPS) * HV + head)[:, None] * K + columns[None, :]
    tl.store(dq_place, dq.to(dtype), mask=mask_reads)

    # erasures, and keys that they and queries meet; what was loaded above is loaded anew: kept, it would spill
    b = load_rows(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
    q = load_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, STEPS, STEPS - 1)
    pairs = tl.load(reads_ptr + pairs_place)
    db = tl.dot(pairs, q, input_precision=PRECISION)
    rate = tl.full([CHUNK], 1.0, tl.float32)
    if rate_ptr is not None:
        rate = load_scalars(rate_ptr + start * HV + head, steps, valid, HV)
    if a_ptr is not None:
        a = load_rows(a_ptr + (start * HA + head // (HV // HA)) * K, steps, valid, columns, HA * K, K, BLOCK_K)
    else:
        a = b
    rated = a
    if rate_ptr is not None:
        rated = (a * rate[:, None]).to(dtype)
    pairs = tl.load(erasures_ptr + pairs_place)
    db = tl.dot(pairs, rated, db, input_precision=PRECISION)
    da = tl.dot(tl.trans(pairs), b, input_precision=PRECISION)
    if dgate_ptr is not None:
        written = tl.sum(b * db, axis=1)
        erased = 0.0 - tl.sum(rated * da, axis=1)
    if own_ptr is not None:
        own = load_scalars(own_ptr + start * HV + head, steps, valid, HV)
        db += own[:, None] * q
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
        erased += tl.sum(a * from_state, axis=1) * rate
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
        place = (block.to(tl.int64) * rows + row) * HV + head
        part = rows * HV * BLOCKS_K
        if READS_BEFORE:
            tl.store(dgate_ptr + place, read - written, mask=valid)
            tl.store(dgate_ptr + 2 * part + place, erased, mask=valid)
        else:
            tl.store(dgate_ptr + place, read - written - erased, mask=valid)
        tl.store(dgate_ptr + part + place, tl.sum(b * from_state, axis=1), mask=valid)
        place = block.to(tl.int64) * (tl.num_programs(0) // BLOCKS_K) + chunk * HV + head
        tl.store(kept_ptr + place, total * tl.sum(kept, axis=0))


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "rows"])
def _finish_sums_kernel(
    parts_ptr,  # dgate of _delta_gradients_kernel, or None
    kept_ptr,  # [blocks of K, chunks, HV]
    drate_ptr,  # [blocks of K, rows, HV], or None
    gate_ptr,  # [tokens, HV] in the dtype of the gate, or None
    rate_ptr,  # [rows, HV] in the dtype of the rate, or None
    chunks_ptr,  # [chunks, 4], or None for a batch
    T,
    chunks_per_seq,
    rows,
    HV: tl.constexpr,
    BLOCKS_K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STEPS: tl.constexpr,
    READS_BEFORE: tl.constexpr,
):
    """Sums over blocks of K, and for a gate over the rows of its chunk: those from it on, those before it."""
    BLOCKS_H: tl.constexpr = (HV + BLOCK_H - 1) // BLOCK_H
    pid = tl.program_id(0)
    start, end, chunk = locate_chunk(pid // BLOCKS_H, chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)[:, None]
    heads = ((pid % BLOCKS_H) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    count = (end - start).to(tl.int32)
    has_head = heads < HV
    size = rows.to(tl.int64) * HV
    place = (start + steps) * HV + heads
    mask = (steps < count) & has_head
    if drate_ptr is not None:
        rate = tl.load(drate_ptr + place, mask=mask, other=0.0)
        for block in tl.static_range(1, BLOCKS_K):
            rate += tl.load(drate_ptr + block * size + place, mask=mask, other=0.0)
        tl.store(rate_ptr + place, rate.to(rate_ptr.dtype.element_ty), mask=mask)
    if parts_ptr is not None:
        num_chunks = tl.num_programs(0) // BLOCKS_H
        from_here = tl.zeros([CHUNK, BLOCK_H], dtype=tl.float32)
        before = tl.zeros([CHUNK, BLOCK_H], dtype=tl.float32)
        kept = tl.zeros([1, BLOCK_H], dtype=tl.float32)
        for block in tl.static_range(BLOCKS_K):
            from_here += tl.load(parts_ptr + block * size + place, mask=mask, other=0.0)
            earlier = mask & (steps > 0)
            before += tl.load(parts_ptr + (BLOCKS_K + block) * size + place - HV, mask=earlier, other=0.0)
            if READS_BEFORE:
                later = (steps + 1 < count) & has_head
                from_here -= tl.load(parts_ptr + (2 * BLOCKS_K + block) * size + place + HV, mask=later, other=0.0)
            kept += tl.load(kept_ptr + (block * num_chunks + chunk) * HV + heads, mask=has_head, other=0.0)
        gate = tl.cumsum(from_here, axis=0, reverse=True) + tl.cumsum(before, axis=0) + kept
        row = start + steps
        place = gate_ptr + (row // STEPS) * HV + heads
        tl.store(place, gate.to(gate_ptr.dtype.element_ty), mask=mask & (row % STEPS == 0))


class RowGradients(NamedTuple):
    """Gradients a head with a state, before sums over heads that share a key or a value, and over tiles of K.

    Attributes:
        q: [B, T, HV, K].
        a: [B, R, HV, K], or None where it is part of b.
        b: [B, R, HV, K].
        v: [B, R, HV, V].
        rate: None or [B, R, HV]; before ``finish_sums`` [blocks of K, B R, HV] float32.
        weight: None or [B, R, HV] in the dtype of w.
        gate: None, or of the shape of log_decay.
    """

    q: Tensor
    a: Tensor | None
    b: Tensor
    v: Tensor
    rate: Tensor | None
    weight: Tensor | None
    gate: Tensor | None


def delta_gradients(
    operands: DeltaOperands,
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
    blocks, total = ceil_div(key_dim, block_k), batch * num_rows
    parts = kept = None
    if needs_gate:
        num_parts = 3 if operands.reads_before_decay else 2
        parts = chunks.rows_like(q, num_parts, blocks, total, heads, dtype=torch.float32)
        kept = q.new_empty(blocks, chunks.count, heads, dtype=torch.float32)
    pairs = pair_gradients(
        *(operands, grad, corrected, residual, gate, chunks),
        scale=scale,
        tiles=pair_tiles,
        max_registers=pair_registers,
    )
    made = RowGradients(
        chunks.rows_like(q, batch, num_rows // steps, heads, key_dim),
        None if a is None else chunks.rows_like(b, batch, num_rows, heads, key_dim),
        chunks.rows_like(b, batch, num_rows, heads, key_dim),
        pairs.v,
        None if rate is None else chunks.rows_like(q, blocks, total, heads, dtype=torch.float32),
        pairs.weight,
        None,
    )
    launch(
        _delta_gradients_kernel,
        (chunks.count * heads * blocks,),
        (
            *(q, a, b, corrected, grad, residual, rate, gate, pairs.reads, pairs.erasures, states, grad_states),
            *(made.q, made.a, made.b, made.rate, pairs.own, parts, kept),
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
            "PRECISION": products_in(q.dtype, device_family(q.device)),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return finish_sums(made, operands, chunks, parts=parts, kept=kept)


def finish_sums(
    made: RowGradients,
    operands: DeltaOperands,
    chunks: Spans,
    *,
    parts: Tensor | None = None,
    kept: Tensor | None = None,
) -> RowGradients:
    """``made`` with dr summed over blocks of K, and with the gradient of a scalar gate from ``parts`` and ``kept``."""
    by_block = made.rate if parts is None else parts[0]
    if by_block is None:
        return made
    rate, gate = None if operands.rate is None else chunks.rows_like(operands.rate), made.gate
    if parts is not None and operands.log_decay is not None:
        gate = chunks.rows_like(operands.log_decay)
    heads, blocks = operands.num_heads, by_block.shape[0]
    block_heads = min(16, power_of_2_from(heads))
    launch(
        _finish_sums_kernel,
        (chunks.count * ceil_div(heads, block_heads),),
        (
            *(parts, kept, made.rate, None if parts is None else gate, rate),
            *(chunks.table, chunks.seq_len, chunks.per_sequence, made.b.shape[0] * made.b.shape[1]),
        ),
        {
            "HV": heads,
            "BLOCKS_K": blocks,
            "CHUNK": chunks.length,
            "BLOCK_H": block_heads,
            "STEPS": operands.num_steps,
            "READS_BEFORE": operands.reads_before_decay,
        },
        num_warps=4,
        num_stages=1,
    )
    return made._replace(rate=rate, gate=gate)
