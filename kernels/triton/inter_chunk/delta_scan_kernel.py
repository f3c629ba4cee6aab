"""The inter-chunk scan of the delta family: that of ``additive_scan`` over values less what the state holds.

Forward, for the micro-steps of one chunk and the state S at its start; A_qk L^-1, key and L^-1 are those of
``ut_transform``:

    R = w v - (beta a from_start) S^T                       U = L^-1 R
    o = scale (q from_start) S^T + (A_qk L^-1) R            S <- S total + R^T key

Reverse, last chunk first, dS at the chunk's end:

    dR = (A_qk L^-1)^T dO + key dS^T      dS <- dS total + scale dO^T (q from_start) - dR^T (beta a from_start)

U is stored for the gradients only: nothing in the scan waits for it. Where a head has several blocks the scan makes
states only, and ``delta_outputs`` the rest. R, and dR where it meets a, are two 16-bit parts: with beta = 2 and a key
that repeats, its terms in S cancel, and one part would lose the value beside them (0.08 of the output after 2048
tokens).

A segment's map S -> S P + H, where sequences are too few to fill the device: H is the scan from zero, P the scan from
the identity without values, both side by side in one launch: columns of P, [K, K], are blocks after those of V, which
start from those of the identity. ``join_maps`` chains them; the reverse scan chains P^T.

Work split: one program a (block of V, head, span); the state is a float32 tile [K, BLOCK_V] in registers, transposed as
in ``additive_scan``. Bytes a micro-step and head, 16-bit, K = V = 128, C = 64: reads q, a, key, v and A_qk L^-1 (1152),
writes o (256); in training reads L^-1 (128), writes U (256) and states (512); with states only it reads a, key and v
(768) and writes those. Floor: q, a, key, v, A_qk L^-1 and o. All but v and o are read once a block of V, from the
second-level cache after the first. The reverse scan reads q, a, key, dO and A_qk L^-1 (1152), writes dR and dS (768). A
segment adds the scans that make H and P, and 4 (K V + K K) bytes written and read for the join.
Shapes: B T HO HV K V, n micro-steps a token, C chunk.
Oracle: ``chunk.py``. Source: arXiv:2406.06484 section 3, arXiv:2412.06464 section 3.
"""

import triton
import triton.language as tl

from statemix.kernels.triton.primitives.gates import DIAGONAL, SCALAR, load_gate_before
from statemix.kernels.triton.primitives.loads import load_scalars, load_sub_step, load_tile, locate, low_part


@triton.jit
def load_from_start(
    gate_ptr,  # as of the scan
    erase_beta_ptr,  # [micro_steps, HV] at the head, or None for 1
    first,
    head,
    steps,
    valid,
    count,
    micro_steps,
    HV: tl.constexpr,
    DECAY: tl.constexpr,
    READS_BEFORE: tl.constexpr,
):
    """from_start, beta from_start of a, and the chunk's decay: all 1 where a diagonal decay has been applied."""
    total, from_start, erase_decay = 1.0, tl.full(steps.shape, 1.0, tl.float32), tl.full(steps.shape, 1.0, tl.float32)
    if DECAY == SCALAR:
        high_ptr = gate_ptr + head * micro_steps + first
        from_start = tl.exp2(tl.load(high_ptr + tl.minimum(steps, count - 1)))
        total = tl.exp2(tl.load(high_ptr + count - 1))
        erase_decay = from_start
        if READS_BEFORE:
            before, _ = load_gate_before(gate_ptr, first, head, steps, count, micro_steps, HV)
            erase_decay = tl.exp2(before)
    if DECAY != DIAGONAL:
        if erase_beta_ptr is not None:
            erase_decay *= load_scalars(erase_beta_ptr + first * HV, steps, valid, HV)
    return from_start, erase_decay, total


@triton.jit
def residuals(
    erase,
    state,
    erase_decay,
    value_ptr,
    write_ptr,
    first,
    steps,
    has_value,
    columns,
    HO: tl.constexpr,
    HV: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """R = w v - (beta a from_start) S^T of the micro-steps ``first + steps``."""
    read = tl.dot(erase, state, input_precision=PRECISION)
    if DECAY != DIAGONAL:
        read *= erase_decay[:, None]
    value = load_tile(value_ptr + first * HO * V, steps, has_value, columns, HO * V, V, BLOCK_V).to(tl.float32)
    if write_ptr is not None:
        value *= load_scalars(write_ptr + first * HV, steps, has_value, HV)[:, None]
    return value - read


@triton.jit
def read_out(query, state, from_start, scores_ptr, high, low, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """o = (q from_start) S^T + scores R; ``from_start`` has the scale in it, high + low is R.

    Scores are loaded after the first product: before it, it would be in shared memory beside the state.
    """
    output = tl.dot(query, state, input_precision=PRECISION)
    if DECAY != DIAGONAL:
        output *= from_start[:, None]
    scores = tl.load(scores_ptr)
    output = tl.dot(scores, high, output, input_precision=PRECISION)
    if high.dtype != tl.float32:
        output = tl.dot(scores, low, output)
    return output


@triton.jit(do_not_specialize=["T", "spans_per_seq", "chunks_per_seq", "span", "micro_steps"])
def delta_scan_kernel(
    query_ptr,  # q, [tokens, HQ, K]; scale q from_start, [micro_steps, HV, K], under a diagonal decay; or None
    erase_ptr,  # a, [micro_steps, HA, K]; beta a from_start, [micro_steps, HV, K], under a diagonal decay
    key_ptr,  # L^-T (b to_end), [micro_steps, HV, K]
    value_ptr,  # v, [micro_steps, HO, V]; dO, [tokens, HO, V]
    scores_ptr,  # A_qk L^-1, [chunks, HV, C, C]; None without output
    erase_beta_ptr,  # [micro_steps, HV], or None for 1
    write_ptr,  # [micro_steps, HV], or None for 1; forward only
    gate_ptr,  # None | [2, HV, micro_steps] of cumulative_gate | [chunks, HV, K] total decay
    initial_ptr,  # [spans, HV, V, K] float32, or None
    output_ptr,  # o, [tokens, HV, V]; dR, [micro_steps, HV, V]; None for states only
    L_inv_ptr,  # L^-1, [chunks, HV, C, C], or None
    u_ptr,  # U, [micro_steps, HV, V], or None
    states_ptr,  # [chunks, HV, K, V]: the state each chunk starts from, or None
    final_ptr,  # [spans, HV, V, K] float32, or None
    maps_ptr,  # P of every span, [spans, HV, K, K] float32, or None
    spans_ptr,  # [spans, 4], or None for a batch
    scale,
    T,
    spans_per_seq,
    chunks_per_seq,
    span,
    micro_steps,
    HQ: tl.constexpr,
    HA: tl.constexpr,
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
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """37 parameters: ten inputs, five outputs, the span and its sizes: all need the state while it is on chip."""
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = BLOCKS_V if maps_ptr is None else BLOCKS_V + (K + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = ((pid // BLOCKS) % HV).to(tl.int64)
    index = pid // (BLOCKS * HV)
    start, end, first_chunk = locate(
        index, spans_ptr, T, spans_per_seq, chunks_per_seq, span, CHUNK, spans_ptr is not None
    )
    num_chunks = ((end - start + CHUNK - 1) // CHUNK).to(tl.int32)
    dtype: tl.constexpr = key_ptr.dtype.element_ty
    QUERY_SUB_STEPS: tl.constexpr = 1 if DECAY == DIAGONAL else SUB_STEPS
    k_columns = tl.arange(0, BLOCK_K)
    v_columns = (pid % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = k_columns < K, v_columns < V  # no column of V in a block of P
    map_columns = v_columns - BLOCKS_V * BLOCK_V
    mask_state = mask_k[:, None] & mask_v[None, :]
    steps = tl.arange(0, CHUNK)

    erase_ptr += head // (HV // HA) * K
    key_ptr += head * K
    value_ptr += head // (HV // HO) * V
    if query_ptr is not None:
        query_ptr += head // (HV // HQ) * K
    if output_ptr is not None:
        output_ptr += head * V
    if erase_beta_ptr is not None:
        erase_beta_ptr += head
    if write_ptr is not None:
        write_ptr += head
    state_offset = (index.to(tl.int64) * HV + head) * K * V + v_columns[None, :] * K + k_columns[:, None]
    if initial_ptr is not None:
        state = tl.load(initial_ptr + state_offset, mask=mask_state, other=0.0)
    elif maps_ptr is not None:
        state = tl.where(k_columns[:, None] == map_columns[None, :], 1.0, 0.0)
    else:
        state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)

    for i in tl.range(0, num_chunks, num_stages=STAGES):
        if REVERSE:
            chunk = num_chunks - 1 - i
        else:
            chunk = i
        first = start + chunk * CHUNK
        count = tl.minimum(end - first, CHUNK).to(tl.int32)
        valid = steps < count
        chunk_head = (first_chunk + chunk) * HV + head
        erase = load_tile(erase_ptr + first * HA * K, steps, valid, k_columns, HA * K, K, BLOCK_K)
        key = load_tile(key_ptr + first * HV * K, steps, valid, k_columns, HV * K, K, BLOCK_K)
        from_start, erase_decay, total = load_from_start(
            gate_ptr, erase_beta_ptr, first, head, steps, valid, count, micro_steps, HV, DECAY, READS_BEFORE
        )
        if DECAY == DIAGONAL:
            total = tl.load(gate_ptr + chunk_head * K + k_columns, mask=mask_k, other=0.0)[:, None]
        from_start *= scale
        if states_ptr is not None:
            place = states_ptr + chunk_head * K * V + k_columns[:, None] * V + v_columns[None, :]
            tl.store(place, state.to(dtype), mask=mask_state)
        mask_rows = valid[:, None] & mask_v[None, :]

        if REVERSE:
            value = load_sub_step(
                value_ptr, first, steps, valid, v_columns, HO * V, V, BLOCK_V, SUB_STEPS, SUB_STEPS - 1
            )
            # R is dR here
            R = tl.dot(key, state.to(dtype), input_precision=PRECISION)
            scores = tl.load(scores_ptr + chunk_head * CHUNK * CHUNK + steps[None, :] * CHUNK + steps[:, None])
            R = tl.dot(scores, value, R, input_precision=PRECISION)
            if output_ptr is not None:
                place = output_ptr + (first + steps)[:, None] * (HV * V) + v_columns[None, :]
                tl.store(place, R.to(dtype), mask=mask_rows)
            query = load_sub_step(
                query_ptr, first, steps, valid, k_columns, HQ * K, K, BLOCK_K, QUERY_SUB_STEPS, QUERY_SUB_STEPS - 1
            )
            state *= total
            if DECAY != DIAGONAL:
                value = (value * from_start[:, None]).to(dtype)
                R *= erase_decay[:, None]
            state = tl.dot(tl.trans(query), value, state, input_precision=PRECISION)
            R = 0.0 - R
            high = R.to(dtype)
            state = tl.dot(tl.trans(erase), high, state, input_precision=PRECISION)
            if dtype != tl.float32:
                low = low_part(R, high)
                state = tl.dot(tl.trans(erase), low, state)
        else:
            has_value = valid
            if maps_ptr is not None:
                has_value = valid & (pid % BLOCKS < BLOCKS_V)
            R = residuals(
                erase,
                state.to(dtype),
                erase_decay,
                value_ptr,
                write_ptr,
                first,
                steps,
                has_value,
                v_columns,
                HO,
                HV,
                V,
                BLOCK_V,
                DECAY,
                PRECISION,
            )
            high = R.to(dtype)
            low = high
            if dtype != tl.float32:
                low = low_part(R, high)
            if output_ptr is not None:
                query = load_sub_step(
                    query_ptr, first, steps, valid, k_columns, HQ * K, K, BLOCK_K, QUERY_SUB_STEPS, QUERY_SUB_STEPS - 1
                )
                place = scores_ptr + chunk_head * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
                output = read_out(query, state.to(dtype), from_start, place, high, low, DECAY, PRECISION)
                micro_step = first + steps
                mask = mask_rows
                if SUB_STEPS > 1:
                    mask = mask & (micro_step % SUB_STEPS == SUB_STEPS - 1)[:, None]
                tl.store(
                    output_ptr + (micro_step // SUB_STEPS)[:, None] * (HV * V) + v_columns[None, :],
                    output.to(dtype),
                    mask=mask,
                )
            if u_ptr is not None:
                L_inv = tl.load(L_inv_ptr + chunk_head * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :])
                u = tl.dot(L_inv, high, input_precision=PRECISION)
                place = u_ptr + head * V + (first + steps)[:, None] * (HV * V) + v_columns[None, :]
                tl.store(place, u.to(dtype), mask=mask_rows)
            state *= total
            state = tl.dot(tl.trans(key), high, state, input_precision=PRECISION)
            if dtype != tl.float32:
                state = tl.dot(tl.trans(key), low, state)

    if final_ptr is not None:
        tl.store(final_ptr + state_offset, state, mask=mask_state)
    if maps_ptr is not None:
        place = maps_ptr + (index.to(tl.int64) * HV + head) * K * K + map_columns[None, :] * K + k_columns[:, None]
        is_inside = (map_columns >= 0) & (map_columns < K)
        tl.store(place, state, mask=mask_k[:, None] & is_inside[None, :])
