"""The inter-chunk scan, with the state on chip: outputs, chunk-start states and the final state.

Forward, for the tokens of one chunk and the state S at its start:

    o = (q from_start) S^T + (q k^T Gamma) v            S <- S total + v^T (k to_end)

The reverse scan of the backward pass is the same scan over (k, q, dO), last chunk first, with from_start and to_end
exchanged and A_qk transposed:

    dv = (k to_end) dS^T + (k q^T Gamma) dO             dS <- dS total + dO^T (q from_start)

so one kernel serves both: a *reader* (q, or k) meets the state, a *writer* (k, or q) and a value (v, or dO) update it.
``scale`` multiplies A_qk and whichever of the two is q. For a diagonal decay ``channel_scores`` has put from_start,
to_end and scale into reader, writer and A_qk already, and the scan loads them.

Work split: one program a (block of V, head, span). A span is a whole sequence; where those are too few to fill the
device, it is a segment, and the scan runs twice: from zero for each segment's own update, then, after ``join_segments``
has chained those, from each segment's true start. The state is a float32 tile [K, BLOCK_V] in registers, transposed
because a tensor core multiplies a narrow right operand wrongly on some compilers (see launch_config).
Bytes a token and head, 16-bit, K = V = 128, C = 64: reads q, k, v (768), writes o (256), and 512 for saved states.
Floor: the same without the states. q and k are read once a block of V, from the second-level cache after the first.
Shapes: B T HV K V, C chunk. Oracle: ``chunk.py``. Source: arXiv:2312.06635 section 4, arXiv:2405.21060 section 6.
"""

import triton
import triton.language as tl

from statemix.kernels.triton.primitives.gates import DIAGONAL, FIXED, NO_DECAY, SCALAR, between, bounded, load_gate
from statemix.kernels.triton.primitives.loads import load_tile, locate


@triton.jit(do_not_specialize=["T", "spans_per_seq", "chunks_per_seq", "span", "tokens"])
def additive_scan_kernel(
    reader_ptr,  # [tokens, HR, K]; None without output
    writer_ptr,  # [tokens, HW, K]
    value_ptr,  # [tokens, HV, V]
    gate_ptr,  # None | [HV] log decay | [2, HV, tokens] of cumulative_gate | [chunks, HV, K] total decay
    A_qk_ptr,  # diagonal decay with output: [chunks, HV, C, C], rows query and columns key
    initial_ptr,  # [spans, HV, V, K] float32, or None
    output_ptr,  # [tokens, HV, V], or None
    states_ptr,  # [chunks, HV, K, V]: the state each chunk starts from, or None
    final_ptr,  # [spans, HV, V, K] float32, or None
    decay_ptr,  # [spans, HV] or [spans, HV, K] float32: decay across the span, or None
    spans_ptr,  # [spans, 4], or None for a batch
    scale,
    T,
    spans_per_seq,
    chunks_per_seq,
    span,
    tokens,
    HR: tl.constexpr,
    HW: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DECAY: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """29 parameters: six inputs, four outputs, the span and its sizes; forward and reverse are one scan."""
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // BLOCKS_V) % HV
    index = pid // (BLOCKS_V * HV)
    start, end, first_chunk = locate(
        index, spans_ptr, T, spans_per_seq, chunks_per_seq, span, CHUNK, spans_ptr is not None
    )
    num_chunks = ((end - start + CHUNK - 1) // CHUNK).to(tl.int32)
    head = head.to(tl.int64)
    k_columns = tl.arange(0, BLOCK_K)
    v_columns = (pid % BLOCKS_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_state = (k_columns < K)[:, None] & (v_columns < V)[None, :]
    steps = tl.arange(0, CHUNK)
    if REVERSE:
        seen = steps[:, None] <= steps[None, :]  # rows are readers, columns are writers
    else:
        seen = steps[:, None] >= steps[None, :]

    if reader_ptr is not None:
        reader_ptr += head // (HV // HR) * K
    writer_ptr += head // (HV // HW) * K
    value_ptr += head * V
    if output_ptr is not None:
        output_ptr += head * V
    state_offset = (index.to(tl.int64) * HV + head) * K * V + v_columns[None, :] * K + k_columns[:, None]
    if initial_ptr is not None:
        state = tl.load(initial_ptr + state_offset, mask=mask_state, other=0.0)
    else:
        state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)
    if DECAY == FIXED:
        gamma = bounded(tl.load(gate_ptr + head).to(tl.float32))
        fixed_decay = tl.exp2(tl.where(seen, gamma * tl.abs(steps[:, None] - steps[None, :]), -float("inf")))
    if decay_ptr is not None:
        if DECAY == DIAGONAL:
            span_decay = tl.full([BLOCK_K], 1.0, dtype=tl.float32)
        elif DECAY == SCALAR:
            span_decay = tl.zeros([], dtype=tl.float32)

    for i in tl.range(0, num_chunks, num_stages=STAGES):
        if REVERSE:
            chunk = num_chunks - 1 - i
        else:
            chunk = i
        first = start + chunk * CHUNK
        count = tl.minimum(end - first, CHUNK).to(tl.int32)
        valid = steps < count
        chunk_index = first_chunk + chunk
        writer = load_tile(writer_ptr + first * HW * K, steps, valid, k_columns, HW * K, K, BLOCK_K)
        value = load_tile(value_ptr + first * HV * V, steps, valid, v_columns, HV * V, V, BLOCK_V)
        dtype: tl.constexpr = value_ptr.dtype.element_ty
        EXACT: tl.constexpr = dtype == tl.float32

        # from_start carries the chunk's start to a token, to_end a token to the chunk's end, total start to end
        if DECAY == FIXED:
            from_start = tl.exp2(gamma * (steps + 1))
            to_end = tl.exp2(gamma * tl.maximum(count - 1 - steps, 0))
            total = tl.exp2(gamma * count)
        elif DECAY == SCALAR:
            high, low, high_end, low_end = load_gate(gate_ptr, first, head, steps, count, tokens, HV)
            from_start = tl.exp2(high)
            to_end = high_end - high
            if EXACT:
                to_end += low_end - low
            to_end = tl.exp2(to_end)
            total = tl.exp2(high_end)
            if decay_ptr is not None:
                span_decay += high_end
        elif DECAY == DIAGONAL:
            total = tl.load(gate_ptr + (chunk_index * HV + head) * K + k_columns, mask=k_columns < K, other=0.0)
            if decay_ptr is not None:
                span_decay *= total

        if states_ptr is not None:
            place = states_ptr + (chunk_index * HV + head) * K * V + k_columns[:, None] * V + v_columns[None, :]
            tl.store(place, state.to(dtype), mask=mask_state)

        if reader_ptr is not None:
            reader = load_tile(reader_ptr + first * HR * K, steps, valid, k_columns, HR * K, K, BLOCK_K)
            output = tl.dot(reader, state.to(dtype), input_precision=PRECISION)
            if DECAY == DIAGONAL:
                place = A_qk_ptr + (chunk_index * HV + head) * CHUNK * CHUNK
                if REVERSE:
                    A_qk = tl.load(place + steps[None, :] * CHUNK + steps[:, None])
                else:
                    A_qk = tl.load(place + steps[:, None] * CHUNK + steps[None, :])
            else:
                A_qk = tl.dot(reader, tl.trans(writer), input_precision=PRECISION) * scale
                if DECAY == FIXED:
                    A_qk *= fixed_decay
                elif DECAY == SCALAR:
                    lag = between(high, low, high, low, EXACT)
                    if REVERSE:
                        lag = -lag
                    A_qk *= tl.exp2(tl.where(seen, lag, -float("inf")))
                else:
                    A_qk = tl.where(seen, A_qk, 0.0)
                if DECAY != NO_DECAY:
                    if REVERSE:
                        output *= to_end[:, None]
                    else:
                        output *= (from_start * scale)[:, None]
                elif not REVERSE:
                    output *= scale
                A_qk = A_qk.to(dtype)
            output = tl.dot(A_qk, value, output, input_precision=PRECISION)
            mask = valid[:, None]
            if V % BLOCK_V != 0:
                mask = mask & (v_columns < V)[None, :]
            place = output_ptr + first * HV * V + steps[:, None] * (HV * V) + v_columns[None, :]
            tl.store(place, output.to(dtype), mask=mask)

        if DECAY == FIXED or DECAY == SCALAR:
            state *= total
            if REVERSE:
                value = (value * (from_start * scale)[:, None]).to(dtype)
            else:
                value = (value * to_end[:, None]).to(dtype)
        elif DECAY == DIAGONAL:
            state *= total[:, None]
        elif REVERSE:
            value = (value * scale).to(dtype)
        state = tl.dot(tl.trans(writer), value, state, input_precision=PRECISION)

    if final_ptr is not None:
        tl.store(final_ptr + state_offset, state, mask=mask_state)
    if decay_ptr is not None:
        if pid % BLOCKS_V == 0:
            if DECAY == DIAGONAL:
                tl.store(decay_ptr + (index.to(tl.int64) * HV + head) * K + k_columns, span_decay, mask=k_columns < K)
            elif DECAY == SCALAR:
                tl.store(decay_ptr + index.to(tl.int64) * HV + head, tl.exp2(span_decay))
            elif DECAY == FIXED:
                tl.store(decay_ptr + index.to(tl.int64) * HV + head, tl.exp2(gamma * (end - start).to(tl.float32)))
