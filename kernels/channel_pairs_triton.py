"""What a walk needs under a diagonal decay, for all chunks at once: see ``channel_levels_triton`` for the derivation.

    P_ij = scale sum_c q_ic e^{G_ic - G_jc} k_jc  (j <= i)
    scale q reach = scale q e^{G}        k rest = k e^{G_C - G}        total = e^{G_C}

and for the delta family, of erasures with directions a and rates r,

    A_ij = r_i sum_c a_ic e^{G_ic - G_jc} k_jc  (j < i)         r a reach = r a e^{G}

which share every exponent with P, unless they read before their own decay: then G_i leaves the gate of row i out.

Work split: one program a (chunk, head); it goes over K in blocks. Bytes a row and head, 16-bit, K = 128, C = 64: reads
q, k and a float32 gate (1024), writes scale q reach, k rest, P and total (648); for erasures also reads a (256; none
where a is k), and writes r a reach and A, with P in float32 (1288 in all). Floor: the reads, P and A. The 0/1 matrices,
2 KB a row, stay in the caches.
Shapes: B T HV K, n micro-steps a token, R = T n rows, C chunk. Oracle: ``decay.py``.
Source: arXiv:2312.06635 section 4.3.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .channel_levels_triton import level_factors, split_gate, sum_tables, sums
from .launch import launch
from .launch_config import Tiles, device_family, products_in
from .operands import ScanOperands
from .spans import Spans
from .tile_triton import load_rows, load_scalars, load_step, locate_chunk


@triton.jit(do_not_specialize=["T", "chunks_per_seq"])
def _channel_pairs_kernel(
    q_ptr,  # [tokens, HQ, K]
    k_ptr,  # [rows, HK, K]
    a_ptr,  # [rows, HA, K]; None where it is k
    rate_ptr,  # [rows, HV], or None for 1
    log_decay_ptr,  # [tokens, HV, K]
    pairs_ptr,  # P, [chunks, HV, C, C]
    erasures_ptr,  # A, [chunks, HV, C, C] float32, None without erasures; its upper half means nothing
    query_ptr,  # q reach, [rows, HV, K]
    eraser_ptr,  # r a reach, [rows, HV, K]
    rest_ptr,  # [rows, HV, K]
    total_ptr,  # [chunks, HV, K] float32
    table_ptr,  # sum_tables
    before_ptr,  # sum_tables of rows that read before their own decay; None where none does
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HA: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEVELS: tl.constexpr,
    STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid % HV).to(tl.int64)
    start, end, chunk = locate_chunk(pid // HV, chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    valid = steps < end - start
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    q_ptr += head // (HV // HQ) * K
    k_ptr += start * HK * K + head // (HV // HK) * K
    row = (start * HV + head) * K  # of the arrays with a row for every value head
    pairs = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    if a_ptr is not None:
        a_ptr += start * HA * K + head // (HV // HA) * K
    if erasures_ptr is not None:
        if rate_ptr is not None:
            rate = load_scalars(rate_ptr + start * HV + head, steps, valid, HV)[:, None]
        erasures = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=1):
        columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
        q = load_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, STEPS, STEPS - 1)
        k = load_rows(k_ptr, steps, valid, columns, HK * K, K, BLOCK_K)
        gate = load_step(log_decay_ptr + head * K, start, steps, valid, columns, HV * K, K, BLOCK_K, STEPS, 0)
        high, low = split_gate(gate, PRECISION)
        mask = valid[:, None]
        if K % BLOCK_K != 0:
            mask = mask & (columns < K)[None, :]
        offsets = steps[:, None] * (HV * K) + columns[None, :]
        rest = tl.exp2(sums(table_ptr, LEVELS, high, low, CHUNK, PRECISION))
        tl.store(rest_ptr + row + offsets, (k * rest).to(dtype), mask=mask)
        reach = tl.exp2(sums(table_ptr, LEVELS + 1, high, low, CHUNK, PRECISION))
        tl.store(query_ptr + row + offsets, (q * reach * scale).to(dtype), mask=mask)
        place = total_ptr + (chunk * HV + head) * K + columns[None, :] + tl.zeros_like(steps)[:, None]
        tl.store(place, reach, mask=(steps == CHUNK - 1)[:, None] & (columns < K)[None, :])
        if erasures_ptr is not None:
            a = k
            if a_ptr is not None:
                a = load_rows(a_ptr, steps, valid, columns, HA * K, K, BLOCK_K)
            if before_ptr is not None:
                reach = tl.exp2(sums(before_ptr, LEVELS + 1, high, low, CHUNK, PRECISION))
            if rate_ptr is not None:
                reach *= rate
            tl.store(eraser_ptr + row + offsets, (a * reach).to(dtype), mask=mask)

        # the rows of a pair differ first at its level; on the diagonal no gate lies between
        is_own = steps[:, None] == steps[None, :]
        pairs = tl.where(is_own, tl.dot(q, tl.trans(k), pairs, input_precision=PRECISION), pairs)
        for level in tl.range(LEVELS, num_stages=STAGES):
            half = steps >> level  # shifted before compared: compared before, the matrix would stay in registers
            is_level = (half[:, None] ^ half[None, :]) == 1
            factor = level_factors(table_ptr, level, high, CHUNK, PRECISION)
            if erasures_ptr is not None:  # read anew: held through the loop beside a second sum, they would spill
                q = load_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, STEPS, STEPS - 1)
                k = load_rows(k_ptr, steps, valid, columns, HK * K, K, BLOCK_K)
            earlier = (k * factor).to(dtype)
            products = tl.dot((q * factor).to(dtype), tl.trans(earlier), input_precision=PRECISION)
            pairs += tl.where(is_level, products, 0.0)
            if erasures_ptr is not None:
                erasers = earlier
                if a_ptr is not None or before_ptr is not None:
                    if before_ptr is not None:
                        factor = level_factors(before_ptr, level, high, CHUNK, PRECISION)
                    a = k
                    if a_ptr is not None:
                        a = load_rows(a_ptr, steps, valid, columns, HA * K, K, BLOCK_K)
                    erasers = (a * factor).to(dtype)
                products = tl.dot(erasers, tl.trans(earlier), input_precision=PRECISION)
                erasures += tl.where(is_level, products, 0.0)

    pairs = tl.where(steps[:, None] >= steps[None, :], pairs * scale, 0.0)
    place = (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    tl.store(pairs_ptr + place, pairs.to(pairs_ptr.dtype.element_ty))
    if erasures_ptr is not None:
        if rate_ptr is not None:
            erasures *= rate
        tl.store(erasures_ptr + place, erasures)


class ChannelPairs(NamedTuple):
    """q reach and k rest [B, T, HV, K], P [chunks, HV, C, C] and total [chunks, HV, K]."""

    reach: Tensor
    rest: Tensor
    pairs: Tensor
    total: Tensor


class ChannelErasures(NamedTuple):
    """What a diagonal decay makes of the rows of a chunk before the inverse.

    Attributes:
        query: q reach scale, [B, R, HV, K], zero but for a token's last row.
        eraser: r a reach, [B, R, HV, K].
        rest: b rest, [B, R, HV, K].
        erasures: A, [chunks, HV, C, C] float32; its upper half means nothing.
        pairs: P, [chunks, HV, C, C] float32.
        total: decay across each chunk, [chunks, HV, K] float32.
    """

    query: Tensor
    eraser: Tensor
    rest: Tensor
    erasures: Tensor
    pairs: Tensor
    total: Tensor


def channel_pairs(
    q: Tensor, k: Tensor, log_decay: Tensor, chunks: Spans, *, scale: float, tiles: Tiles
) -> ChannelPairs:
    """Prepare a diagonal decay; log_decay [B, T, HV, K]. Tokens of no document stay unwritten."""
    made = ChannelPairs(
        q.new_empty(log_decay.shape),
        q.new_empty(log_decay.shape),
        q.new_empty(chunks.count, log_decay.shape[2], chunks.length, chunks.length),
        q.new_empty(chunks.count, *log_decay.shape[2:], dtype=torch.float32),
    )
    written = (made.pairs, None, made.reach, None, made.rest, made.total)
    _launch(q, k, None, None, log_decay, written, chunks, scale=scale, tiles=tiles)
    return made


def channel_erasures(operands: ScanOperands, chunks: Spans, *, scale: float, tiles: Tiles) -> ChannelErasures:
    """Prepare erasures under a diagonal decay; ``chunks`` in rows. Rows of no document stay unwritten."""
    q, a, b, _, rate, _, log_decay, *_ = operands
    assert log_decay is not None
    shape, square = (*b.shape[:2], *log_decay.shape[2:]), (chunks.length, chunks.length)
    heads = log_decay.shape[2]
    made = ChannelErasures(
        q.new_empty(shape),
        q.new_empty(shape),
        q.new_empty(shape),
        q.new_empty(chunks.count, heads, *square, dtype=torch.float32),
        q.new_empty(chunks.count, heads, *square, dtype=torch.float32),
        q.new_empty(chunks.count, *log_decay.shape[2:], dtype=torch.float32),
    )
    _launch(
        *(q, b, a, rate, log_decay),
        (made.pairs, made.erasures, made.query, made.eraser, made.rest, made.total),
        chunks,
        scale=scale,
        tiles=tiles,
        num_steps=operands.num_steps,
        reads_before=operands.reads_before_decay,
    )
    return made


def _launch(
    q: Tensor,
    k: Tensor,
    a: Tensor | None,
    rate: Tensor | None,
    log_decay: Tensor,
    written: tuple[Tensor | None, ...],
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    num_steps: int = 1,
    reads_before: bool = False,
) -> None:
    heads, key_dim = log_decay.shape[2:]
    launch(
        _channel_pairs_kernel,
        (chunks.count * heads,),
        (
            *(q, k, a, rate, log_decay, *written),
            sum_tables(chunks.length, q),
            sum_tables(chunks.length, q, reads_before=True) if reads_before else None,
            chunks.table,
            scale,
            chunks.seq_len,
            chunks.per_sequence,
        ),
        {
            "HQ": q.shape[2],
            "HK": k.shape[2],
            "HA": (k if a is None else a).shape[2],
            "HV": heads,
            "K": key_dim,
            "CHUNK": chunks.length,
            "BLOCK_K": tiles.block,
            "LEVELS": chunks.length.bit_length() - 1,
            "STEPS": num_steps,
            "PRECISION": products_in(q.dtype, device_family(q.device)),
            "STAGES": tiles.num_stages,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
