"""What a walk needs under a diagonal decay, for all chunks at once: see ``channel_factors`` for the derivation.

    P_ij = scale sum_c q_ic e^{G_ic - G_jc} k_jc  (j <= i)
    scale q reach = scale q e^{G}        k rest = k e^{G_C - G}        total = e^{G_C}

and for the delta family, of erasures with directions a and rates r,

    A_ij = r_i sum_c a_ic e^{G_ic - G_jc} k_jc  (j < i)         r a reach = r a e^{G}

which share every exponent with P, unless they read before their own decay: then G_i leaves the gate of row i out.

Work split: one program a (chunk, head) goes over K in blocks. ``_channel_pairs_kernel`` makes all but the pairs of
steep rows, from the chunk's start; ``_steep_pairs_kernel`` makes those by levels, and returns at once where there are
none. With the levels for every row GLA's forward pass took 0.39 ms on an H200 at B8 T2048 H16 D128 instead of 0.26.
Bytes a row and head, 16-bit, K = 128, C = 64: reads q, k and the gate (768), writes scale q reach, k rest, P and total
(648); for erasures also reads a (256; none where a is k), and writes r a reach and A, with P in float32 (1288 in all).
Floor: the reads, P and A. The 0/1 matrices of the levels, 2 KB a row, stay in the caches.
Shapes: B T HV K, n micro-steps a token, R = T n rows, C chunk. Oracle: ``decay.py``.
Source: arXiv:2312.06635 section 4.3."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans, power_of_2_from
from statemix.kernels.triton.primitives.channel_factors import (
    cumulative_gates,
    first_steep,
    level_factors,
    split_gate,
    sum_tables,
)
from statemix.kernels.triton.primitives.loads import load_rows, load_scalars, load_step, locate_chunk


@triton.jit(do_not_specialize=["T", "chunks_per_seq"])
def _channel_pairs_kernel(
    q_ptr,  # [tokens, HQ, K]
    k_ptr,  # [rows, HK, K]
    a_ptr,  # [rows, HA, K]; None where it is k
    rate_ptr,  # [rows, HV], or None for 1
    log_decay_ptr,  # [tokens, HV, K]
    pairs_ptr,  # P, [chunks, HV, C, C]
    erasures_ptr,  # A, [chunks, HV, C, C] float32, None without erasures; its upper half means nothing
    query_ptr,  # scale q reach, [rows, HV, K]
    eraser_ptr,  # r a reach, [rows, HV, K]
    rest_ptr,  # k rest, [rows, HV, K]
    total_ptr,  # [chunks, HV, K] float32
    steep_ptr,  # first steep row, [chunks, HV] int32
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
    STEPS: tl.constexpr,
    READS_BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
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
    log_decay_ptr += head * K
    row = (start * HV + head) * K  # of the arrays with a row for every value head
    steep = CHUNK
    pairs = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    if erasures_ptr is not None:
        erasures = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        rate = tl.full([CHUNK, 1], 1.0, tl.float32)
        if rate_ptr is not None:
            rate = load_scalars(rate_ptr + start * HV + head, steps, valid, HV)[:, None]
        if a_ptr is not None:
            a_ptr += start * HA * K + head // (HV // HA) * K
    for block in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=1):
        columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = valid[:, None]
        if K % BLOCK_K != 0:
            mask = mask & (columns < K)[None, :]
        offsets = row + steps[:, None] * (HV * K) + columns[None, :]
        gates, own_gate = cumulative_gates(
            log_decay_ptr, start, steps, valid, columns, HV * K, K, BLOCK_K, STEPS, PRECISION
        )
        steep = tl.minimum(steep, first_steep(gates, CHUNK, dtype))
        total = tl.sum(tl.where(steps[:, None] == CHUNK - 1, gates, 0.0), axis=0)
        tl.store(total_ptr + (chunk * HV + head) * K + columns, tl.exp2(total), mask=columns < K)
        k = load_rows(k_ptr, steps, valid, columns, HK * K, K, BLOCK_K)
        tl.store(rest_ptr + offsets, (k * tl.exp2(total[None, :] - gates)).to(dtype), mask=mask)
        earlier = (k * tl.exp2(0.0 - gates)).to(dtype)
        q = load_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, STEPS, STEPS - 1)
        query = (q * tl.exp2(gates) * scale).to(dtype)
        tl.store(query_ptr + offsets, query, mask=mask)
        pairs = tl.dot(query, tl.trans(earlier), pairs, input_precision=PRECISION)
        if erasures_ptr is not None:
            # read anew: held from above, k would spill
            if a_ptr is not None:
                a = load_rows(a_ptr, steps, valid, columns, HA * K, K, BLOCK_K)
            else:
                a = load_rows(k_ptr, steps, valid, columns, HK * K, K, BLOCK_K)
            if READS_BEFORE:
                gates -= own_gate
            eraser = (a * (tl.exp2(gates) * rate)).to(dtype)
            tl.store(eraser_ptr + offsets, eraser, mask=mask)
            erasures = tl.dot(eraser, tl.trans(earlier), erasures, input_precision=PRECISION)
    tl.store(steep_ptr + chunk * HV + head, steep)
    place = (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    mask = (steps < steep)[:, None] & (steps < CHUNK)[None, :]
    pairs = tl.where(steps[:, None] >= steps[None, :], pairs, 0.0)
    tl.store(pairs_ptr + place, pairs.to(pairs_ptr.dtype.element_ty), mask=mask)
    if erasures_ptr is not None:
        tl.store(erasures_ptr + place, tl.where(steps[:, None] > steps[None, :], erasures, 0.0), mask=mask)


@triton.jit(do_not_specialize=["T", "chunks_per_seq"])
def _steep_pairs_kernel(
    q_ptr,  # as of _channel_pairs_kernel
    k_ptr,
    a_ptr,
    rate_ptr,
    log_decay_ptr,
    pairs_ptr,
    erasures_ptr,
    steep_ptr,
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
    steep = tl.load(steep_ptr + chunk * HV + head)
    if steep == CHUNK:
        return
    steps = tl.arange(0, CHUNK)
    valid = steps < end - start
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    q_ptr += head // (HV // HQ) * K
    k_ptr += start * HK * K + head // (HV // HK) * K
    pairs = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    if a_ptr is not None:
        a_ptr += start * HA * K + head // (HV // HA) * K
    if erasures_ptr is not None:
        erasures = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=1):
        columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
        q = load_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, STEPS, STEPS - 1)
        k = load_rows(k_ptr, steps, valid, columns, HK * K, K, BLOCK_K)
        gate = load_step(log_decay_ptr + head * K, start, steps, valid, columns, HV * K, K, BLOCK_K, STEPS, 0)
        high, _ = split_gate(gate, PRECISION)
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
    mask = (steps >= steep)[:, None] & (steps < CHUNK)[None, :]
    tl.store(pairs_ptr + place, pairs.to(pairs_ptr.dtype.element_ty), mask=mask)
    if erasures_ptr is not None:
        if rate_ptr is not None:
            erasures *= load_scalars(rate_ptr + start * HV + head, steps, valid, HV)[:, None]
        tl.store(erasures_ptr + place, erasures, mask=mask)


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
    """Both kernels; ``written`` in the order of the first one's parameters, from pairs to total."""
    heads, key_dim = log_decay.shape[2:]
    grid = (chunks.count * heads,)
    given, place = (q, k, a, rate, log_decay), (chunks.table, scale, chunks.seq_len, chunks.per_sequence)
    steep = q.new_empty(chunks.count, heads, dtype=torch.int32)
    sizes = {
        "HQ": q.shape[2],
        "HK": k.shape[2],
        "HA": (k if a is None else a).shape[2],
        "HV": heads,
        "K": key_dim,
        "CHUNK": chunks.length,
        "STEPS": num_steps,
        "PRECISION": products_in(q.dtype, device_arch(q.device)),
    }
    wide = min(2 * tiles.block, max(tiles.block, power_of_2_from(key_dim)))
    launch(
        _channel_pairs_kernel,
        grid,
        (*given, *written, steep, *place),
        {**sizes, "BLOCK_K": wide, "READS_BEFORE": reads_before},
        num_warps=tiles.num_warps,
        num_stages=1,
    )
    tables = sum_tables(chunks.length, q), sum_tables(chunks.length, q, reads_before=True) if reads_before else None
    launch(
        _steep_pairs_kernel,
        grid,
        (*given, *written[:2], steep, *tables, *place),
        {**sizes, "BLOCK_K": tiles.block, "LEVELS": chunks.length.bit_length() - 1, "STAGES": tiles.num_stages},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
