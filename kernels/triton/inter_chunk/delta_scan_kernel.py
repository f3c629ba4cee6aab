"""The walk of the delta family: that of ``additive_scan`` with every value corrected by what the state holds already.

Forward, for the rows of one chunk and the state S at its start; Q, W and T are those of ``ut_transform``:

    R = w v - (r a reach) S^T      o = scale (q reach) S^T + Q R      S <- S total + R^T W      U = T R

Reverse, last chunk first, dS at the chunk's end:

    dR = Q^T dO + W dS^T           dS <- dS total + scale dO^T (q reach) - dR^T (r a reach)

U is stored for the gradients only: nothing in the walk waits for it. Where a head has several blocks the walk makes
states only, and ``delta_outputs`` the rest. R, and dR where it meets a, are two 16-bit parts: with beta = 2 and
a key that repeats, its terms in S cancel, and one part would lose the value beside them (0.08 of the output after 2048
tokens).

A segment's map S -> S P + H, where sequences are too few to fill the device: H is the walk from zero, P the walk from
the identity without values, both side by side in one launch: columns of P are blocks after those of V, which start from
those of the identity. ``join_maps`` chains them; the reverse walk chains P^T. (P is K x K here; the pairs of rows are
inside Q.)

Work split: one program a (block of V, head, span); the state is a float32 tile [K, BLOCK_V] in registers, transposed as
in ``additive_scan``. Bytes a row and head, 16-bit, K = V = 128, C = 64: reads q, a, W, v and Q (1152), writes o (256);
in training reads T (128), writes U (256) and states (512); with states only it reads a, W and v (768) and writes those.
Floor: q, a, W, v, Q and o. q, a, W and Q are read once a block of V, from the second-level cache after the first. The
reverse walk reads q, a, W, dO and Q (1152), writes dR and dS (768). A segment adds the walks that make H and P, and 4
(K V + K K) bytes written and read for the join.
Shapes: B T HO HV K V, n micro-steps a token, R = T n rows, C chunk.
Oracle: ``chunk.py``. Source: arXiv:2406.06484 section 3, arXiv:2412.06464 section 3.
"""

import triton
import triton.language as tl

from statemix.kernels.triton.primitives.gates import DIAGONAL, SCALAR, load_gate_before
from statemix.kernels.triton.primitives.loads import load_rows, load_scalars, load_step, locate, low_part


@triton.jit
def load_reach(
    gate_ptr,  # as of the walk
    rate_ptr,  # [rows, HV] at the head, or None for 1
    first,
    head,
    steps,
    valid,
    count,
    rows,
    HV: tl.constexpr,
    DECAY: tl.constexpr,
    READS_BEFORE: tl.constexpr,
):
    """reach, r reach of erasures, and the decay across the chunk: all 1 where a diagonal decay has been applied."""
    total, reach, read_reach = 1.0, tl.full(steps.shape, 1.0, tl.float32), tl.full(steps.shape, 1.0, tl.float32)
    if DECAY == SCALAR:
        high_ptr = gate_ptr + head * rows + first
        reach = tl.exp2(tl.load(high_ptr + tl.minimum(steps, count - 1)))
        total = tl.exp2(tl.load(high_ptr + count - 1))
        read_reach = reach
        if READS_BEFORE:
            before, _ = load_gate_before(gate_ptr, first, head, steps, count, rows, HV)
            read_reach = tl.exp2(before)
    if DECAY != DIAGONAL:
        if rate_ptr is not None:
            read_reach *= load_scalars(rate_ptr + first * HV, steps, valid, HV)
    return reach, read_reach, total


@triton.jit
def residual_rows(
    eraser,
    state,
    read_reach,
    value_ptr,
    weight_ptr,
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
    """R = w v - (r a reach) S^T of the rows ``first + steps``."""
    residual = tl.dot(eraser, state, input_precision=PRECISION)
    if DECAY != DIAGONAL:
        residual *= read_reach[:, None]
    value = load_rows(value_ptr + first * HO * V, steps, has_value, columns, HO * V, V, BLOCK_V).to(tl.float32)
    if weight_ptr is not None:
        value *= load_scalars(weight_ptr + first * HV, steps, has_value, HV)[:, None]
    return value - residual


@triton.jit
def read_out(query, state, reach, pairs_ptr, high, low, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """o = (q reach) S^T + Q R; ``reach`` has the scale in it, ``pairs_ptr`` is where Q lies, high + low is R.

    Q is loaded after the first product: before it, it would be in shared memory beside the state.
    """
    output = tl.dot(query, state, input_precision=PRECISION)
    if DECAY != DIAGONAL:
        output *= reach[:, None]
    pairs = tl.load(pairs_ptr)
    output = tl.dot(pairs, high, output, input_precision=PRECISION)
    if high.dtype != tl.float32:
        output = tl.dot(pairs, low, output)
    return output


@triton.jit(do_not_specialize=["T", "spans_per_seq", "chunks_per_seq", "span", "rows"])
def _delta_walk_kernel(
    query_ptr,  # q, [tokens, HQ, K]; q reach scale, [rows, HV, K], under a diagonal decay; None without output
    eraser_ptr,  # a, [rows, HA, K]; r a reach, [rows, HV, K], under a diagonal decay
    key_ptr,  # W, [rows, HV, K]
    value_ptr,  # v, [rows, HO, V]; dO, [tokens, HO, V]
    pairs_ptr,  # Q, [chunks, HV, C, C]; None without output
    rate_ptr,  # [rows, HV], or None for 1
    weight_ptr,  # [rows, HV], or None for 1; forward only
    gate_ptr,  # None | [2, HV, rows] of cumulative_gate | [chunks, HV, K] total decay
    initial_ptr,  # [spans, HV, V, K] float32, or None
    output_ptr,  # o, [tokens, HV, V]; dR, [rows, HV, V]; None for states only
    inverse_ptr,  # T, [chunks, HV, C, C], or None
    corrected_ptr,  # U, [rows, HV, V], or None
    states_ptr,  # [chunks, HV, K, V]: the state each chunk starts from, or None
    final_ptr,  # [spans, HV, V, K] float32, or None
    maps_ptr,  # P of every span, [spans, HV, K, K] float32, or None
    spans_ptr,  # [spans, 4], or None for a batch
    scale,
    T,
    spans_per_seq,
    chunks_per_seq,
    span,
    rows,
    HQ: tl.constexpr,
    HA: tl.constexpr,
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
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
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
    QUERY_STEPS: tl.constexpr = 1 if DECAY == DIAGONAL else STEPS
    k_columns = tl.arange(0, BLOCK_K)
    v_columns = (pid % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = k_columns < K, v_columns < V  # no column of V in a block of P
    map_columns = v_columns - BLOCKS_V * BLOCK_V
    mask_state = mask_k[:, None] & mask_v[None, :]
    steps = tl.arange(0, CHUNK)

    eraser_ptr += head // (HV // HA) * K
    key_ptr += head * K
    value_ptr += head // (HV // HO) * V
    if query_ptr is not None:
        query_ptr += head // (HV // HQ) * K
    if output_ptr is not None:
        output_ptr += head * V
    if rate_ptr is not None:
        rate_ptr += head
    if weight_ptr is not None:
        weight_ptr += head
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
        eraser = load_rows(eraser_ptr + first * HA * K, steps, valid, k_columns, HA * K, K, BLOCK_K)
        key = load_rows(key_ptr + first * HV * K, steps, valid, k_columns, HV * K, K, BLOCK_K)
        reach, read_reach, total = load_reach(
            gate_ptr, rate_ptr, first, head, steps, valid, count, rows, HV, DECAY, READS_BEFORE
        )
        if DECAY == DIAGONAL:
            total = tl.load(gate_ptr + chunk_head * K + k_columns, mask=mask_k, other=0.0)[:, None]
        reach *= scale
        if states_ptr is not None:
            place = states_ptr + chunk_head * K * V + k_columns[:, None] * V + v_columns[None, :]
            tl.store(place, state.to(dtype), mask=mask_state)
        mask_rows = valid[:, None] & mask_v[None, :]

        if REVERSE:
            value = load_step(value_ptr, first, steps, valid, v_columns, HO * V, V, BLOCK_V, STEPS, STEPS - 1)
            residual = tl.dot(key, state.to(dtype), input_precision=PRECISION)
            pairs = tl.load(pairs_ptr + chunk_head * CHUNK * CHUNK + steps[None, :] * CHUNK + steps[:, None])
            residual = tl.dot(pairs, value, residual, input_precision=PRECISION)
            if output_ptr is not None:
                place = output_ptr + (first + steps)[:, None] * (HV * V) + v_columns[None, :]
                tl.store(place, residual.to(dtype), mask=mask_rows)
            query = load_step(
                query_ptr, first, steps, valid, k_columns, HQ * K, K, BLOCK_K, QUERY_STEPS, QUERY_STEPS - 1
            )
            state *= total
            if DECAY != DIAGONAL:
                value = (value * reach[:, None]).to(dtype)
                residual *= read_reach[:, None]
            state = tl.dot(tl.trans(query), value, state, input_precision=PRECISION)
            residual = 0.0 - residual
            high = residual.to(dtype)
            state = tl.dot(tl.trans(eraser), high, state, input_precision=PRECISION)
            if dtype != tl.float32:
                low = low_part(residual, high)
                state = tl.dot(tl.trans(eraser), low, state)
        else:
            has_value = valid
            if maps_ptr is not None:
                has_value = valid & (pid % BLOCKS < BLOCKS_V)
            residual = residual_rows(
                eraser,
                state.to(dtype),
                read_reach,
                value_ptr,
                weight_ptr,
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
            high = residual.to(dtype)
            low = high
            if dtype != tl.float32:
                low = low_part(residual, high)
            if output_ptr is not None:
                query = load_step(
                    query_ptr, first, steps, valid, k_columns, HQ * K, K, BLOCK_K, QUERY_STEPS, QUERY_STEPS - 1
                )
                place = pairs_ptr + chunk_head * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
                output = read_out(query, state.to(dtype), reach, place, high, low, DECAY, PRECISION)
                row = first + steps
                mask = mask_rows
                if STEPS > 1:
                    mask = mask & (row % STEPS == STEPS - 1)[:, None]
                tl.store(
                    output_ptr + (row // STEPS)[:, None] * (HV * V) + v_columns[None, :], output.to(dtype), mask=mask
                )
            if corrected_ptr is not None:
                inverse = tl.load(inverse_ptr + chunk_head * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :])
                corrected = tl.dot(inverse, high, input_precision=PRECISION)
                place = corrected_ptr + head * V + (first + steps)[:, None] * (HV * V) + v_columns[None, :]
                tl.store(place, corrected.to(dtype), mask=mask_rows)
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
