"""Decay between the micro-steps of a chunk, of its own for every channel, as factors of matrix products.

    A_qk_ij = sum_c q_ic e^{G_ic - G_jc} k_jc   (j <= i)

*From the chunk's start*, where decay is moderate: A_qk = (q e^G)(k e^-G)^T. e^-G is at most 2^LIMIT, which bfloat16
holds as it holds 1, so no score is less exact for it; float16 holds less. Scores in the wrong order may be as large,
and are masked. A micro-step is *steep* from the first one on up to which a channel decays by more. Whether one is steep
depends on no later one, or outputs would.

*By levels*, for scores of steep micro-steps: blocks are halved, and no exponent is above 0. A score i > j lies in the
later and the earlier half of exactly one block of 2w micro-steps, w = C/2, C/4, .. 1. At that level the exponent splits
at the boundary between the halves into two sums of gates, each <= 0, of which i needs only the first and j only the
second. So each micro-step has *one* factor a level,

    E_i = e^{sum of gates from the later half's first to i}              in a later half
    E_j = e^{sum of gates after j to the earlier half's last}            in an earlier half

and with X = E * (q in later halves, k in earlier ones) the level's scores are entries of X X^T. The exponents are a 0/1
matrix times the gates, on the tensor cores: exact segment sums, since a gate is split in two float16 numbers, good to
2^-22; between the micro-steps of a chunk of 16-bit inputs the first of them is enough. The boundary lies between past
and future, so no later gate ever touches an earlier micro-step. (The difference of two running sums, fetched by
``tl.gather``, took half as long again; factors of a level made from those of the level before it, by exchanging the
totals of halves between rows, 1.7 times as long.)

The 0/1 matrices are read from a table rather than compared together anew by every program: that took half of the
instructions.

Source: arXiv:2312.06635 section 4.3 (secondary chunking), carried down to single micro-steps. Oracle: ``decay.py``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch

from .gates import bounded
from .loads import load_sub_step

LIMIT = tl.constexpr(64.0)
FLOAT16_LIMIT = tl.constexpr(4.0)


@triton.jit
def first_below(x, limit: tl.constexpr, CHUNK: tl.constexpr):
    """The first row of x [C, BLOCK_K] with a number below ``limit``, C for none; a NaN is below it."""
    # over both axes at once: one after the other would stop the compiler for Blackwell
    return tl.min(tl.where(x >= limit, CHUNK, tl.arange(0, CHUNK)[:, None]))


@triton.jit
def first_steep(gates, CHUNK: tl.constexpr, dtype: tl.constexpr):
    """The first steep micro-step of cumulative gates [C, BLOCK_K], C for none."""
    limit: tl.constexpr = FLOAT16_LIMIT if dtype == tl.float16 else LIMIT
    return first_below(gates, -limit, CHUNK)


@triton.jit
def cumulative_gates(
    log_decay_ptr,
    start,
    steps,
    valid,
    columns,
    STRIDE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB_STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """G of a chunk and each micro-step's own gate, base 2, [C, BLOCK_K] float32."""
    gate = load_sub_step(log_decay_ptr, start, steps, valid, columns, STRIDE, K, BLOCK_K, SUB_STEPS, 0)
    high, low = split_gate(gate, PRECISION)
    if PRECISION == "tf32":
        up_to = (steps[:, None] >= steps[None, :]).to(tl.float16)
        gates = tl.dot(up_to, high, tl.dot(up_to, low))
    else:
        gates = tl.dot((steps[:, None] >= steps[None, :]).to(tl.float32), high, input_precision=PRECISION)
    return gates, bounded(gate.to(tl.float32))


@triton.jit
def _sum_tables_kernel(table_ptr, CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr, READS_BEFORE: tl.constexpr):
    """Matrix ``level`` of the table: the gates s (columns) whose sum is the exponent of row r; see ``sum_tables``."""
    level = tl.program_id(0)
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    if TRANSPOSED:
        gate, named_row = row, column
    else:
        gate, named_row = column, row
    same_half = (named_row >> level) == (gate >> level)
    up_to = gate <= named_row
    is_later = ((named_row >> level) & 1) == 1
    named = same_half & (up_to == is_later)
    if READS_BEFORE:
        up_to = gate < named_row
        named = named & (up_to | (is_later == 0))
    if level == tl.num_programs(0) - 1:
        named = up_to  # from_start; the level before it, whose half is the chunk, came out as to_end
    place = table_ptr + (level * CHUNK + row) * CHUNK + column
    tl.store(place, named.to(table_ptr.dtype.element_ty))


def sum_tables(chunk_size: int, like: Tensor, *, reads_before: bool = False) -> Tensor:
    """0/1 matrices [log2 C + 2, C, C]: the exponents of the levels, then *to_end*, then *from_start*.

    Args:
        reads_before: one of a later half, and *from_start*, leave their own gate out.
    """
    dtype = torch.float32 if like.dtype == torch.float32 else torch.float16
    return _tables(chunk_size, like, dtype, transposed=False, reads_before=reads_before)


def spread_tables(chunk_size: int, like: Tensor, *, reads_before: bool = False) -> Tensor:
    """The same matrices transposed, [log2 C + 2, C, C]; float16 would lose small gradients, so it takes float32."""
    dtype = torch.bfloat16 if like.dtype == torch.bfloat16 else torch.float32
    return _tables(chunk_size, like, dtype, transposed=True, reads_before=reads_before)


def _tables(chunk_size: int, like: Tensor, dtype: torch.dtype, *, transposed: bool, reads_before: bool) -> Tensor:
    table = like.new_empty(chunk_size.bit_length() + 1, chunk_size, chunk_size, dtype=dtype)
    constants = {"CHUNK": chunk_size, "TRANSPOSED": transposed, "READS_BEFORE": reads_before}
    launch(_sum_tables_kernel, (table.shape[0],), (table,), constants, num_warps=4, num_stages=1)
    return table


@triton.jit
def split_gate(log_decay, PRECISION: tl.constexpr):
    """Base-2 gates as two parts: float16 high and low, or float32 and nothing when sums are to be exact."""
    gate = bounded(log_decay.to(tl.float32))
    if PRECISION == "tf32":
        high = gate.to(tl.float16)
    else:
        high = gate
    return high, (gate - high.to(tl.float32)).to(tl.float16)


@triton.jit
def sums(table_ptr, index, high, low, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of gates that matrix ``index`` of the table names, [C, BLOCK_K]."""
    steps = tl.arange(0, CHUNK)
    named = tl.load(table_ptr + (index * CHUNK + steps[:, None]) * CHUNK + steps[None, :])
    if PRECISION == "tf32":
        result = tl.dot(named, high, tl.dot(named, low))
    else:
        result = tl.dot(named, high, input_precision=PRECISION)
    return result


@triton.jit
def level_factors(table_ptr, level, high, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """e to the sums of a level; for 16-bit inputs of the high parts alone, off by x e^-x 2^-12 at most, 9e-5."""
    steps = tl.arange(0, CHUNK)
    named = tl.load(table_ptr + (level * CHUNK + steps[:, None]) * CHUNK + steps[None, :])
    return tl.exp2(tl.dot(named, high, input_precision=PRECISION))


@triton.jit
def is_later(steps, level):
    """1 for steps of the later half of their block of 2 w, w = 2^level, else 0."""
    return (steps >> level) & 1


@triton.jit
def spread(table_ptr, index, x, dgate, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Add what exponents get, x, to the gates in them; ``table_ptr`` is of ``spread_tables``."""
    steps = tl.arange(0, CHUNK)
    named = tl.load(table_ptr + (index * CHUNK + steps[:, None]) * CHUNK + steps[None, :])
    return tl.dot(named, x.to(named.dtype), dgate, input_precision=PRECISION)
