"""Device functions that kernels of every stage share: where a run of tokens lies, and tiles of its tensors.

A *span* is a run of tokens of one sequence that one program works on: a chunk, a segment of several chunks, or the
whole sequence. In a batch its place is arithmetic; for packed documents it is a row (start, end, first chunk, document)
of a table made on the device (``packed_spans``), so that no length is ever read on the host. Spans and ``steps`` in
them count micro-steps where a token has several.
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
def load_tile(ptr, steps, valid, columns, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``steps`` of a [micro_steps, STRIDE] array from ``ptr`` on; zero after the span's end and past WIDTH columns."""
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(ptr + steps[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_sub_step(
    ptr,
    first,
    steps,
    valid,
    columns,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB_STEPS: tl.constexpr,
    SUB_STEP: tl.constexpr,
):
    """Micro-steps ``first + steps``, SUB_STEPS a token, of a [tokens, STRIDE] array: zero but for sub-step SUB_STEP.

    Decays belong to the first sub-step of a token, queries to the last.
    """
    if SUB_STEPS == 1:
        tile = load_tile(ptr + first * STRIDE, steps, valid, columns, STRIDE, WIDTH, BLOCK)
    else:
        micro_step = first + steps
        mask = (valid & (micro_step % SUB_STEPS == SUB_STEP))[:, None] & (columns < WIDTH)[None, :]
        tile = tl.load(ptr + (micro_step // SUB_STEPS)[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)
    return tile


@triton.jit
def load_scalars(ptr, steps, valid, STRIDE: tl.constexpr):
    """One number a micro-step, float32, 1 where there is no array."""
    if ptr is not None:
        result = tl.load(ptr + steps * STRIDE, mask=valid, other=0.0).to(tl.float32)
    else:
        result = tl.full(steps.shape, 1.0, tl.float32)
    return result


@triton.jit
def store_value_gradients(
    dR, v_ptr, dv_ptr, write, start, head, steps, valid, columns, HO: tl.constexpr, HV: tl.constexpr, V: tl.constexpr
):
    """Store columns of dv = w dR, and return their share of dw = v^T dR; v has HO heads, dv has HV."""
    mask = valid[:, None] & (columns < V)[None, :]
    place = ((start + steps) * HV + head)[:, None] * V + columns[None, :]
    tl.store(dv_ptr + place, (dR * write[:, None]).to(dv_ptr.dtype.element_ty), mask=mask)
    place = ((start + steps) * HO + head // (HV // HO))[:, None] * V + columns[None, :]
    v = tl.load(v_ptr + place, mask=mask, other=0.0)
    return tl.sum(dR.to(tl.float32) * v, axis=1)
