"""Decay kinds, and the cumulative gate of a chunk."""

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
def bounded(log_decay):
    """A log decay in base 2, finite, so that no sum of them is -inf - -inf. A maximum would hide a NaN."""
    return tl.where(log_decay < LEAST_LOG_DECAY, LEAST_LOG_DECAY, log_decay) * LOG2_E


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
def load_gate_before(gate_ptr, start, head, steps, count, tokens, HV: tl.constexpr):
    """The cumulative gate of ``load_gate`` before the decay of each row, 0 at the chunk's first row."""
    high_ptr = gate_ptr + head * tokens + start
    low_ptr = high_ptr + HV * tokens.to(tl.int64)
    rows = tl.minimum(steps - 1, count - 1)
    return tl.load(high_ptr + rows, mask=steps > 0, other=0.0), tl.load(low_ptr + rows, mask=steps > 0, other=0.0)


@triton.jit
def between(row, row_low, column, column_low, EXACT: tl.constexpr):
    """Cumulative gate of rows less that of columns, [C, C]: the log decays in between, where rows are the later ones.

    For 16-bit inputs the high parts are enough: e to their difference is off by 2^-24 |G| of itself, which stays below
    a quarter of a unit of float16 up to |G| = 2^11.
    """
    lag = row[:, None] - column[None, :]
    if EXACT:
        lag += row_low[:, None] - column_low[None, :]
    return lag
