"""Device functions that every kernel of a chunk form shares: where a run of tokens lies, and the decay between tokens.

A *span* is a run of tokens of one sequence that one program walks: a chunk, a segment of several chunks, or the whole
sequence. In a batch its place is arithmetic; for packed documents it is a row (start, end, first chunk, document) of
a table made on the device (``packed_spans``), so that no length is ever read on the host.

Exponents are base 2 and never above 0. The cumulative gate of a chunk is kept as two float32 numbers, high and low
part of a float64 sum, so that a difference of two of them is the sum of the segment between, to float32 precision.
"""

import triton
import triton.language as tl


@triton.jit
def locate(span, spans_ptr, T, spans_per_seq, chunks_per_seq, SPAN, CHUNK: tl.constexpr, IS_PACKED: tl.constexpr):
    """(first token, one past the last token, index of the first chunk) of a span of at most ``SPAN`` tokens."""
    if IS_PACKED:
        start = tl.load(spans_ptr + span * 4).to(tl.int64)
        end = tl.load(spans_ptr + span * 4 + 1).to(tl.int64)
        first_chunk = tl.load(spans_ptr + span * 4 + 2).to(tl.int64)
    else:
        sequence = span // spans_per_seq
        within = (span % spans_per_seq).to(tl.int64) * SPAN
        start = sequence.to(tl.int64) * T + within
        end = tl.minimum(start + SPAN, (sequence.to(tl.int64) + 1) * T)
        first_chunk = sequence.to(tl.int64) * chunks_per_seq + within // CHUNK
    return start, end, first_chunk


@triton.jit
def locate_chunk(chunk, chunks_ptr, T, chunks_per_seq, CHUNK: tl.constexpr):
    """``locate`` of one chunk."""
    return locate(chunk, chunks_ptr, T, chunks_per_seq, chunks_per_seq, CHUNK, CHUNK, chunks_ptr is not None)


@triton.jit
def low_part(x, high):
    """What ``high``, x in 16 bits, leaves of x."""
    return (x - high.to(tl.float32)).to(high.dtype)


@triton.jit
def load_rows(ptr, steps, valid, columns, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a [tokens, STRIDE] array from its row ``ptr`` on; zero after the span's end and past WIDTH columns."""
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(ptr + steps[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_step(
    ptr,
    first,
    steps,
    valid,
    columns,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Micro-steps ``first + steps`` of a [tokens, STRIDE] array, STEPS a token: step STEP has its row, others are zero.

    Decays belong to the first step of a token, queries to the last.
    """
    if STEPS == 1:
        rows = load_rows(ptr + first * STRIDE, steps, valid, columns, STRIDE, WIDTH, BLOCK)
    else:
        row = first + steps
        mask = (valid & (row % STEPS == STEP))[:, None] & (columns < WIDTH)[None, :]
        rows = tl.load(ptr + (row // STEPS)[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)
    return rows


@triton.jit
def load_scalars(ptr, steps, valid, STRIDE: tl.constexpr):
    """One number a row, float32, 1 where there is no array."""
    if ptr is not None:
        result = tl.load(ptr + steps * STRIDE, mask=valid, other=0.0).to(tl.float32)
    else:
        result = tl.full(steps.shape, 1.0, tl.float32)
    return result


@triton.jit
def store_value_gradients(
    residual,
    v_ptr,
    dv_ptr,
    weight,
    start,
    head,
    steps,
    valid,
    columns,
    HO: tl.constexpr,
    HV: tl.constexpr,
    V: tl.constexpr,
):
    """Store columns of dv = w dR, and return their share of dw = v^T dR; v has HO heads, dv has HV."""
    mask = valid[:, None] & (columns < V)[None, :]
    place = ((start + steps) * HV + head)[:, None] * V + columns[None, :]
    tl.store(dv_ptr + place, (residual * weight[:, None]).to(dv_ptr.dtype.element_ty), mask=mask)
    place = ((start + steps) * HO + head // (HV // HO))[:, None] * V + columns[None, :]
    v = tl.load(v_ptr + place, mask=mask, other=0.0)
    return tl.sum(residual.to(tl.float32) * v, axis=1)
