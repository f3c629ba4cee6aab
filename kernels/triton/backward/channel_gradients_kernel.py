"""Gradients under a diagonal decay, for all chunks at once; ``channel_factors`` says what is steep.

With X = q e^G, Y = b e^-G and E = beta a e^G as rounded for the products, and dA_qk without its diagonal,

    Dq = scale dO S + dA_qk Y                dq = e^G Dq
    Da = dA_kk Y - dR S                      da = beta e^G Da        dbeta = a e^G Da
    Db = total U dS + dA_qk^T X + dA_kk^T E  db = e^-G Db
    dg_t = sum over micro-steps i >= t of (X Dq + E Da - Y (dA_qk^T X + dA_kk^T E))
           + micro-steps j < t of Y total U dS  +  total S dS

where a score of two micro-steps that are both after t comes twice, with opposite signs and the same factors: what is
left of it is float32's rounding. The score of a micro-step with itself (the diagonal of dA_qk) has no gate, and would
swamp the others. Micro-steps after a single gate of less than -GATE_LIMIT count as steep here: the gradient of such a
gate is as small as what is left.

dA_qk, dA_kk, dv and dw are those of ``score_gradients``. Scores of steep micro-steps are left out, and then added by
``steep_gradients``.

Work split: one program a (block of K, chunk, head); U, dO and dR are read whole by each. What is loaded twice would
spill if it were held. On an H200 at B8 T2048 H16 D128 0.60 ms for GLA (24 registers spilled), 1.01 for KDA (152), where
the levels for every micro-step take 0.94 and 1.60. Slower: 8 warps (1.06, 1.46), blocks of 128 (1.66, 2.88; 8 warps
1.54, 3.79), at most 168 registers (1.04, 1.81).
Bytes a micro-step and head, 16-bit, K = V = 128, C = 64: q, b, U, dO, dR, the gate, S, dS, dA_qk and dA_kk read (2816),
dq, db and a float32 gate gradient written (1024); a read and da written (512) where a is free. Floor: these.
Shapes: B T HO HV K V, n micro-steps a token, C chunk.
Oracle: autograd through ``chunk.py``. Source: arXiv:2312.06635 section 4.3, arXiv:2510.26692 section 3.
"""

import triton
import triton.language as tl

from statemix.kernels.triton.primitives.channel_factors import cumulative_gates, first_below, first_steep
from statemix.kernels.triton.primitives.loads import load_scalars, load_sub_step, load_tile, locate_chunk, low_part

GATE_LIMIT = tl.constexpr(10.0)  # base 2


@triton.jit
def _sum_rows(named, x, sums, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Add to ``sums`` a 0/1 matrix times x, float32, in two parts that the products take as they are."""
    if dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        named = named.to(tl.bfloat16)
        sums = tl.dot(named, high, tl.dot(named, low_part(x, high), sums))
    else:
        named = named.to(tl.float32)
        if PRECISION == "tf32":  # float16 would lose small gradients
            high = x.to(tl.bfloat16).to(tl.float32)
            sums = tl.dot(named, x - high, sums, input_precision=PRECISION)
            sums = tl.dot(named, high, sums, input_precision=PRECISION)
        else:
            sums = tl.dot(named, x, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "micro_steps"])
def channel_gradients_kernel(
    q_ptr,  # [tokens, HQ, K]
    a_ptr,  # [micro_steps, HA, K], or None for b
    b_ptr,  # [micro_steps, HB, K]
    u_ptr,  # U or v, [micro_steps, HV, V]
    grad_ptr,  # dO, [tokens, HO, V]
    dR_ptr,  # dR, [micro_steps, HV, V]; None without erase pairs
    erase_beta_ptr,  # [micro_steps, HV], or None for 1
    log_decay_ptr,  # [tokens, HV, K]
    dA_qk_ptr,  # transposed, without its diagonal, [chunks, HV, C, C]
    diagonal_ptr,  # its diagonal, [micro_steps, HV] float32
    dA_kk_ptr,  # transposed, [chunks, HV, C, C]
    states_ptr,  # S at chunk starts, [chunks, HV, K, V]
    grad_states_ptr,  # dS at chunk ends, [chunks, HV, K, V]
    dq_ptr,  # [tokens, HV, K]
    da_ptr,  # [micro_steps, HV, K]; None where a is b
    db_ptr,  # [micro_steps, HV, K]
    d_erase_beta_ptr,  # None | [blocks of K, micro_steps, HV] float32
    dgate_ptr,  # [tokens, HV, K] float32
    steep_ptr,  # first steep micro-step, [blocks of K, chunks, HV] int32
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
    READS_BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """37 parameters: thirteen inputs, six outputs and their sizes: the gate's gradient needs all others on chip."""
    BLOCKS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    block = pid % BLOCKS_K
    head = ((pid // BLOCKS_K) % HV).to(tl.int64)
    start, end, chunk = locate_chunk(pid // (BLOCKS_K * HV), chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    valid = steps < end - start
    micro_step = start + steps
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = columns < K
    mask = valid[:, None] & mask_k[None, :]
    dtype: tl.constexpr = b_ptr.dtype.element_ty
    dA_place = (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    q_ptr += head // (HV // HQ) * K
    b_ptr += (start * HB + head // (HV // HB)) * K
    grad_ptr += head // (HV // HO) * V
    u_ptr += (start * HV + head) * V
    scalars = start * HV + head
    row_offsets = scalars * K + steps[:, None] * (HV * K) + columns[None, :]
    state_offset = (chunk * HV + head) * K * V + columns[:, None] * V

    log_decay_ptr += head * K
    gates, gate = cumulative_gates(
        log_decay_ptr, start, steps, valid, columns, HV * K, K, BLOCK_K, SUB_STEPS, PRECISION
    )
    steep = tl.minimum(first_steep(gates, CHUNK, dtype), first_below(gate, -GATE_LIMIT, CHUNK))
    tl.store(steep_ptr + block * (tl.num_programs(0) // BLOCKS_K) + chunk * HV + head, steep)
    is_moderate = (steps < steep)[:, None]
    mask_dA = (steps[:, None] < CHUNK) & (steps < steep)[None, :]  # of scores [key, query]

    # queries; what is loaded anew further down would spill, were it kept
    d = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for part in tl.static_range(BLOCKS_V):
        v_columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = mask_k[:, None] & (v_columns < V)[None, :]
        grad = load_sub_step(grad_ptr, start, steps, valid, v_columns, HO * V, V, BLOCK_V, SUB_STEPS, SUB_STEPS - 1)
        state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        d = tl.dot(grad, tl.trans(state), d, input_precision=PRECISION)
    d *= scale
    gates, _ = cumulative_gates(log_decay_ptr, start, steps, valid, columns, HV * K, K, BLOCK_K, SUB_STEPS, PRECISION)
    b = load_tile(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
    down = tl.where(is_moderate, b * tl.exp2(0.0 - gates), 0.0).to(dtype)
    dA = tl.load(dA_qk_ptr + dA_place, mask=mask_dA, other=0.0)
    d = tl.dot(tl.trans(dA), down, d, input_precision=PRECISION)
    factor = tl.exp2(gates)
    q = load_sub_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, SUB_STEPS, SUB_STEPS - 1)
    z = (q * factor).to(dtype) * d
    diagonal = load_scalars(diagonal_ptr + scalars, steps, valid, HV)[:, None]
    d = d * factor + diagonal * b
    mask_reads = mask
    if SUB_STEPS > 1:
        mask_reads = mask & (micro_step % SUB_STEPS == SUB_STEPS - 1)[:, None]
    dq_place = dq_ptr + ((micro_step // SUB_STEPS) * HV + head)[:, None] * K + columns[None, :]
    tl.store(dq_place, d.to(dtype), mask=mask_reads)

    # erase directions
    if dR_ptr is not None:
        dR_ptr += scalars * V
        d = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        for part in tl.static_range(BLOCKS_V):
            v_columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
            mask_state = mask_k[:, None] & (v_columns < V)[None, :]
            dR = load_tile(dR_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
            state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
            d = tl.dot(dR, tl.trans(state), d, input_precision=PRECISION)
        dA = tl.load(dA_kk_ptr + dA_place, mask=mask_dA, other=0.0)
        d = tl.dot(tl.trans(dA), down, 0.0 - d, input_precision=PRECISION)
        factor, gate = cumulative_gates(
            log_decay_ptr, start, steps, valid, columns, HV * K, K, BLOCK_K, SUB_STEPS, PRECISION
        )
        if READS_BEFORE:
            factor -= gate
        factor = tl.exp2(factor)
        if a_ptr is not None:
            a_ptr += (start * HA + head // (HV // HA)) * K
            a = load_tile(a_ptr, steps, valid, columns, HA * K, K, BLOCK_K)
        else:
            a = load_tile(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
        erase_beta = tl.full([CHUNK, 1], 1.0, tl.float32)
        if erase_beta_ptr is not None:
            erase_beta = load_scalars(erase_beta_ptr + scalars, steps, valid, HV)[:, None]
        E = (a * (factor * erase_beta)).to(dtype)
        if READS_BEFORE:
            z_before = E * d
        else:
            z += E * d
        d *= factor
        if d_erase_beta_ptr is not None:
            tl.store(
                d_erase_beta_ptr + (block.to(tl.int64) * micro_steps + micro_step) * HV + head,
                tl.sum(a * d, axis=1),
                mask=valid,
            )
        d *= erase_beta
        if da_ptr is not None:
            tl.store(da_ptr + row_offsets, d.to(dtype), mask=mask)
        else:
            tl.store(db_ptr + row_offsets, d.to(dtype), mask=mask)

    # keys
    gates, before = cumulative_gates(
        log_decay_ptr, start, steps, valid, columns, HV * K, K, BLOCK_K, SUB_STEPS, PRECISION
    )
    if READS_BEFORE:
        before = gates - before
    else:
        before = gates
    q = load_sub_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, SUB_STEPS, SUB_STEPS - 1)
    dA = tl.load(dA_qk_ptr + dA_place, mask=mask_dA, other=0.0)
    d = tl.dot(dA, (q * tl.exp2(gates)).to(dtype), input_precision=PRECISION)
    b = load_tile(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
    if dR_ptr is not None:
        if a_ptr is not None:
            a = load_tile(a_ptr, steps, valid, columns, HA * K, K, BLOCK_K)
        else:
            a = b
        erase_beta = tl.full([CHUNK, 1], 1.0, tl.float32)
        if erase_beta_ptr is not None:
            erase_beta = load_scalars(erase_beta_ptr + scalars, steps, valid, HV)[:, None]
        dA = tl.load(dA_kk_ptr + dA_place, mask=mask_dA, other=0.0)
        d = tl.dot(dA, (a * (tl.exp2(before) * erase_beta)).to(dtype), d, input_precision=PRECISION)
    factor = tl.where(is_moderate, tl.exp2(0.0 - gates), 0.0)
    z -= (b * factor).to(dtype) * d
    diagonal = load_scalars(diagonal_ptr + scalars, steps, valid, HV)[:, None]
    db = d * factor + diagonal * q
    if dR_ptr is not None:
        if da_ptr is None:
            tl.debug_barrier()
            db += tl.load(db_ptr + row_offsets, mask=mask, other=0.0)
    state_dot = tl.zeros([BLOCK_K], dtype=tl.float32)
    d = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for part in tl.static_range(BLOCKS_V):
        v_columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = mask_k[:, None] & (v_columns < V)[None, :]
        u = load_tile(u_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
        grad_state = tl.load(grad_states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        d = tl.dot(u, tl.trans(grad_state), d, input_precision=PRECISION)
        state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        state_dot += tl.sum(grad_state.to(tl.float32) * state, axis=1)
    gates, _ = cumulative_gates(log_decay_ptr, start, steps, valid, columns, HV * K, K, BLOCK_K, SUB_STEPS, PRECISION)
    last = tl.sum(tl.where(steps[:, None] == CHUNK - 1, gates, 0.0), axis=0)
    d *= tl.exp2(last[None, :] - gates)
    tl.store(db_ptr + row_offsets, (db + d).to(dtype), mask=mask)

    b = load_tile(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
    dgate = (tl.exp2(last) * state_dot)[None, :] + tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dgate = _sum_rows((steps[:, None] > steps[None, :]), b * d, dgate, dtype, PRECISION)
    dgate = _sum_rows((steps[:, None] <= steps[None, :]), z, dgate, dtype, PRECISION)
    if READS_BEFORE:
        if dR_ptr is not None:
            dgate = _sum_rows((steps[:, None] < steps[None, :]), z_before, dgate, dtype, PRECISION)
    gate_place = dgate_ptr + ((micro_step // SUB_STEPS) * HV + head)[:, None] * K + columns[None, :]
    tl.store(gate_place, dgate, mask=mask & (micro_step % SUB_STEPS == 0)[:, None])
