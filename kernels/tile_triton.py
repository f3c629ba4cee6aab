"""Device functions that every kernel of a chunk form shares: where a run of tokens lies, and the decay between tokens.

A *span* is a run of tokens of one sequence that one program walks: a chunk, a segment of several chunks, or the whole
sequence. In a batch its place is arithmetic; for packed documents it is a row (start, end, first chunk, document) of
a table made on the device (``span_table``), so that no length is ever read on the host.

Exponents are base 2 and never above 0. The cumulative gate of a chunk is kept as two float32 numbers, high and low
part of a float64 sum, so that a difference of two of them is the sum of the segment between, to float32 precision.
"""

import triton
import triton.language as tl
from torch import Tensor

NO_DECAY = tl.constexpr(0)
FIXED = tl.constexpr(1)
SCALAR = tl.constexpr(2)
DIAGONAL = tl.constexpr(3)

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_LOG_DECAY = tl.constexpr(-120.0)  # e^-120 is 0 in float32; a finite bound keeps -inf - -inf out of the sums


def decay_kind(log_decay: Tensor | None) -> int:
    """Which of the four a log_decay None, [HV], [B, T, HV] or [B, T, HV, K] is."""
    kinds = {None: NO_DECAY, 1: FIXED, 3: SCALAR, 4: DIAGONAL}
    return int(kinds[None if log_decay is None else log_decay.ndim].value)


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
def load_rows(ptr, steps, valid, columns, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a [tokens, STRIDE] array from its row ``ptr`` on; zero after the span's end and past WIDTH columns."""
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(ptr + steps[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_gate(gate_ptr, start, head, steps, count, tokens, HV: tl.constexpr):
    """Cumulative gate of a chunk, high and low part, and the same at its last token; gate is [2, HV, tokens].

    Rows after the last token repeat it, so that no exponent of theirs is above 0 either.
    """
    high_ptr = gate_ptr + head * tokens + start
    low_ptr = high_ptr + HV * tokens.to(tl.int64)
    rows = tl.minimum(steps, count - 1)
    return (
        tl.load(high_ptr + rows),
        tl.load(low_ptr + rows),
        tl.load(high_ptr + count - 1),
        tl.load(low_ptr + count - 1),
    )


@triton.jit
def between(high, low, EXACT: tl.constexpr):
    """Sum of log decays over s < r <= t for rows t and columns s (t >= s), [C, C].

    For 16-bit inputs the high parts are enough: their difference is off by 2^-24 |G|, which stays below half a unit of
    float16 up to |G| = 2^13.
    """
    lag = high[:, None] - high[None, :]
    if EXACT:
        lag += low[:, None] - low[None, :]
    return lag
