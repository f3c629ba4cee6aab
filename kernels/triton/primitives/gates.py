"""Scalar gates in device code: kinds of decay, and the cumulative gate of a chunk.

Exponents are base 2 and never above 0. The cumulative gate of a chunk is kept as two float32 numbers, high and low
part of a float64 sum, so that a difference of two of them is the sum of the segment between, to float32 precision.
"""

import triton
import triton.language as tl

NO_DECAY = tl.constexpr(0)
FIXED = tl.constexpr(1)
SCALAR = tl.constexpr(2)
DIAGONAL = tl.constexpr(3)
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_LOG_DECAY = tl.constexpr(-120.0)  # e^-120 is 0 in float32; a finite bound keeps -inf - -inf out of the sums


@triton.jit
def bounded(log_decay):
    """A log decay in base 2, finite, so that no sum of them is -inf - -inf. A maximum would hide a NaN."""
    return tl.where(log_decay < LEAST_LOG_DECAY, LEAST_LOG_DECAY, log_decay) * LOG2_E


@triton.jit
def load_gate(gate_ptr, start, head, steps, count, tokens, HV: tl.constexpr):
    """Cumulative gate of a chunk, high and low part, and the same at its last token; gate is [2, HV, tokens].

    Steps after the last repeat it, so that no exponent of theirs is above 0 either.
    """
    high_ptr = gate_ptr + head * tokens + start
    low_ptr = high_ptr + HV * tokens.to(tl.int64)
    index = tl.minimum(steps, count - 1)
    return (
        tl.load(high_ptr + index),
        tl.load(low_ptr + index),
        tl.load(high_ptr + count - 1),
        tl.load(low_ptr + count - 1),
    )


@triton.jit
def load_gate_before(gate_ptr, start, head, steps, count, tokens, HV: tl.constexpr):
    """The cumulative gate of ``load_gate`` before the decay of each step, 0 at the chunk's first."""
    high_ptr = gate_ptr + head * tokens + start
    low_ptr = high_ptr + HV * tokens.to(tl.int64)
    index = tl.minimum(steps - 1, count - 1)
    return tl.load(high_ptr + index, mask=steps > 0, other=0.0), tl.load(low_ptr + index, mask=steps > 0, other=0.0)


@triton.jit
def between(row, row_low, column, column_low, EXACT: tl.constexpr):
    """log2 Gamma, [C, C]: cumulative gate of rows less that of columns, where rows are the later ones.

    For 16-bit inputs the high parts are enough: e to their difference is off by 2^-24 |G| of itself, which stays below
    a quarter of a unit of float16 up to |G| = 2^11.
    """
    lag = row[:, None] - column[None, :]
    if EXACT:
        lag += row_low[:, None] - column_low[None, :]
    return lag
