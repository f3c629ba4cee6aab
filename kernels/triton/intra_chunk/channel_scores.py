"""Scores under a diagonal decay, for all chunks at once: see ``channel_factors`` for the derivation.

    A_qk_ij = scale sum_c q_ic e^{G_ic - G_jc} b_jc  (j <= i)
    scale q from_start = scale q e^{G}        b to_end = b e^{G_C - G}        total = e^{G_C}

and for the delta family, of erase directions a and erase beta,

    A_kk_ij = beta_i sum_c a_ic e^{G_ic - G_jc} b_jc  (j < i)         beta a from_start = beta a e^{G}

which share every exponent with A_qk, unless they read before their own decay: then G_i leaves the gate of i out.

Work split: one program a (chunk, head) goes over K in blocks. ``_channel_scores_kernel`` makes all but the scores of
steep micro-steps, from the chunk's start; ``_steep_scores_kernel`` makes those by levels, and returns at once where
there are none. With the levels for every micro-step GLA's forward pass took 0.39 ms on an H200 at B8 T2048 H16 D128
instead of 0.26.
Bytes a micro-step and head, 16-bit, K = 128, C = 64: reads q, b and the gate (768), writes scale q from_start,
b to_end, A_qk and total (648); for A_kk also reads a (256; none where a is b), and writes beta a from_start and A_kk,
with A_qk in float32 (1288 in all). Floor: the reads, A_qk and A_kk. The 0/1 matrices of the levels, 2 KB a micro-step,
stay in the caches.
Shapes: B T HV K, n micro-steps a token, C chunk. Oracle: ``decay.py``. Source: arXiv:2312.06635 section 4.3.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans
from statemix.kernels.triton.primitives.channel_factors import (
    cumulative_gates,
    first_steep,
    level_factors,
    split_gate,
    sum_tables,
)
from statemix.kernels.triton.primitives.loads import load_scalars, load_sub_step, load_tile, locate_chunk
from statemix.kernels.triton.primitives.sizes import sizes, wide_block


@triton.jit(do_not_specialize=["T", "chunks_per_seq"])
def _channel_scores_kernel(
    q_ptr,  # [tokens, HQ, K]
    k_ptr,  # [micro_steps, HB, K]
    a_ptr,  # [micro_steps, HA, K]; None where it is b
    erase_beta_ptr,  # [micro_steps, HV], or None for 1
    log_decay_ptr,  # [tokens, HV, K]
    A_qk_ptr,  # [chunks, HV, C, C]
    A_kk_ptr,  # [chunks, HV, C, C] float32, None without erase pairs; its upper half means nothing
    q_from_start_ptr,  # scale q from_start, [micro_steps, HV, K]
    a_from_start_ptr,  # beta a from_start, [micro_steps, HV, K]
    b_to_end_ptr,  # b to_end, [micro_steps, HV, K]
    total_ptr,  # [chunks, HV, K] float32
    steep_ptr,  # first steep micro-step, [chunks, HV] int32
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    HQ: tl.constexpr,
    HB: tl.constexpr,
    HA: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB_STEPS: tl.constexpr,
    READS_BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """26 parameters: five operands, and seven outputs that share the exponentials of a gate."""
    pid = tl.program_id(0)
    head = (pid % HV).to(tl.int64)
    start, end, chunk = locate_chunk(pid // HV, chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    valid = steps < end - start
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    q_ptr += head // (HV // HQ) * K
    k_ptr += start * HB * K + head // (HV // HB) * K
    log_decay_ptr += head * K
    row = (start * HV + head) * K  # of the arrays with a vector for every value head
    steep = CHUNK
    A_qk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    if A_kk_ptr is not None:
        A_kk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        erase_beta = tl.full([CHUNK, 1], 1.0, tl.float32)
        if erase_beta_ptr is not None:
            erase_beta = load_scalars(erase_beta_ptr + start * HV + head, steps, valid, HV)[:, None]
        if a_ptr is not None:
            a_ptr += start * HA * K + head // (HV // HA) * K
    for block in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=1):
        columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = valid[:, None]
        if K % BLOCK_K != 0:
            mask = mask & (columns < K)[None, :]
        offsets = row + steps[:, None] * (HV * K) + columns[None, :]
        gates, own_gate = cumulative_gates(
            log_decay_ptr, start, steps, valid, columns, HV * K, K, BLOCK_K, SUB_STEPS, PRECISION
        )
        steep = tl.minimum(steep, first_steep(gates, CHUNK, dtype))
        total = tl.sum(tl.where(steps[:, None] == CHUNK - 1, gates, 0.0), axis=0)
        tl.store(total_ptr + (chunk * HV + head) * K + columns, tl.exp2(total), mask=columns < K)
        k = load_tile(k_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
        tl.store(b_to_end_ptr + offsets, (k * tl.exp2(total[None, :] - gates)).to(dtype), mask=mask)
        earlier = (k * tl.exp2(0.0 - gates)).to(dtype)
        q = load_sub_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, SUB_STEPS, SUB_STEPS - 1)
        q_from_start = (q * tl.exp2(gates) * scale).to(dtype)
        tl.store(q_from_start_ptr + offsets, q_from_start, mask=mask)
        A_qk = tl.dot(q_from_start, tl.trans(earlier), A_qk, input_precision=PRECISION)
        if A_kk_ptr is not None:
            # read anew: held from above, b would spill
            if a_ptr is not None:
                a = load_tile(a_ptr, steps, valid, columns, HA * K, K, BLOCK_K)
            else:
                a = load_tile(k_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
            if READS_BEFORE:
                gates -= own_gate
            a_from_start = (a * (tl.exp2(gates) * erase_beta)).to(dtype)
            tl.store(a_from_start_ptr + offsets, a_from_start, mask=mask)
            A_kk = tl.dot(a_from_start, tl.trans(earlier), A_kk, input_precision=PRECISION)
    tl.store(steep_ptr + chunk * HV + head, steep)
    place = (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    mask = (steps < steep)[:, None] & (steps < CHUNK)[None, :]
    A_qk = tl.where(steps[:, None] >= steps[None, :], A_qk, 0.0)
    tl.store(A_qk_ptr + place, A_qk.to(A_qk_ptr.dtype.element_ty), mask=mask)
    if A_kk_ptr is not None:
        tl.store(A_kk_ptr + place, tl.where(steps[:, None] > steps[None, :], A_kk, 0.0), mask=mask)


@triton.jit(do_not_specialize=["T", "chunks_per_seq"])
def _steep_scores_kernel(
    q_ptr,  # as of _channel_scores_kernel
    k_ptr,
    a_ptr,
    erase_beta_ptr,
    log_decay_ptr,
    A_qk_ptr,
    A_kk_ptr,
    steep_ptr,
    table_ptr,  # sum_tables
    before_ptr,  # sum_tables of those that read before their own decay; None where none does
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    HQ: tl.constexpr,
    HB: tl.constexpr,
    HA: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEVELS: tl.constexpr,
    SUB_STEPS: tl.constexpr,
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
    k_ptr += start * HB * K + head // (HV // HB) * K
    A_qk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    if a_ptr is not None:
        a_ptr += start * HA * K + head // (HV // HA) * K
    if A_kk_ptr is not None:
        A_kk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=1):
        columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
        q = load_sub_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, SUB_STEPS, SUB_STEPS - 1)
        k = load_tile(k_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
        gate = load_sub_step(log_decay_ptr + head * K, start, steps, valid, columns, HV * K, K, BLOCK_K, SUB_STEPS, 0)
        high, _ = split_gate(gate, PRECISION)
        # two micro-steps differ first at their level; on the diagonal no gate lies between
        is_own = steps[:, None] == steps[None, :]
        A_qk = tl.where(is_own, tl.dot(q, tl.trans(k), A_qk, input_precision=PRECISION), A_qk)
        for level in tl.range(LEVELS, num_stages=STAGES):
            half = steps >> level  # shifted before compared: compared before, the matrix would stay in registers
            is_level = (half[:, None] ^ half[None, :]) == 1
            factor = level_factors(table_ptr, level, high, CHUNK, PRECISION)
            if A_kk_ptr is not None:  # read anew: held through the loop beside a second sum, they would spill
                q = load_sub_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, SUB_STEPS, SUB_STEPS - 1)
                k = load_tile(k_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
            earlier = (k * factor).to(dtype)
            products = tl.dot((q * factor).to(dtype), tl.trans(earlier), input_precision=PRECISION)
            A_qk += tl.where(is_level, products, 0.0)
            if A_kk_ptr is not None:
                later = earlier
                if a_ptr is not None or before_ptr is not None:
                    if before_ptr is not None:
                        factor = level_factors(before_ptr, level, high, CHUNK, PRECISION)
                    a = k
                    if a_ptr is not None:
                        a = load_tile(a_ptr, steps, valid, columns, HA * K, K, BLOCK_K)
                    later = (a * factor).to(dtype)
                products = tl.dot(later, tl.trans(earlier), input_precision=PRECISION)
                A_kk += tl.where(is_level, products, 0.0)

    A_qk = tl.where(steps[:, None] >= steps[None, :], A_qk * scale, 0.0)
    place = (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    mask = (steps >= steep)[:, None] & (steps < CHUNK)[None, :]
    tl.store(A_qk_ptr + place, A_qk.to(A_qk_ptr.dtype.element_ty), mask=mask)
    if A_kk_ptr is not None:
        if erase_beta_ptr is not None:
            A_kk *= load_scalars(erase_beta_ptr + start * HV + head, steps, valid, HV)[:, None]
        tl.store(A_kk_ptr + place, A_kk, mask=mask)


class ChannelScores(NamedTuple):
    """What a diagonal decay makes of the micro-steps of every chunk; those of no document stay unwritten.

    Attributes:
        q_from_start: scale q e^G, [B, T n, HV, K], zero but for a token's last micro-step.
        a_from_start: beta a e^G, [B, T n, HV, K]; None without erase pairs.
        b_to_end: b e^{G_C - G}, [B, T n, HV, K].
        A_qk: [chunks, HV, C, C], float32 with erase pairs.
        A_kk: [chunks, HV, C, C] float32, its upper half means nothing; None without erase pairs.
        total: decay across each chunk, [chunks, HV, K] float32.
    """

    q_from_start: Tensor
    a_from_start: Tensor | None
    b_to_end: Tensor
    A_qk: Tensor
    A_kk: Tensor | None
    total: Tensor


def channel_scores(operands: ScanOperands, chunks: Spans, *, scale: float, tiles: Tiles) -> ChannelScores:
    """Scores and decayed operands of every chunk; ``chunks`` in micro-steps."""
    q, a, b, _, erase_beta, _, log_decay, *_ = operands
    assert log_decay is not None
    heads, key_dim = log_decay.shape[2:]
    vectors, square = (*b.shape[:2], heads, key_dim), (chunks.count, heads, chunks.length, chunks.length)
    erases, before = operands.erases, operands.reads_before_decay
    scores = ChannelScores(
        q.new_empty(vectors),
        q.new_empty(vectors) if erases else None,
        q.new_empty(vectors),
        q.new_empty(square, dtype=torch.float32 if erases else None),
        q.new_empty(square, dtype=torch.float32) if erases else None,
        q.new_empty(chunks.count, heads, key_dim, dtype=torch.float32),
    )
    steep = q.new_empty(chunks.count, heads, dtype=torch.int32)
    grid, inputs, outputs = (chunks.count * heads,), (q, b, a, erase_beta, log_decay), (scores.A_qk, scores.A_kk)
    decayed = (scores.q_from_start, scores.a_from_start, scores.b_to_end, scores.total)
    constants = sizes(operands, chunks) | {"LEVELS": chunks.length.bit_length() - 1, "STAGES": tiles.num_stages}
    wide, narrow = ({**constants, "BLOCK_K": block} for block in (wide_block(tiles, key_dim), tiles.block))
    args: tuple[Any, ...] = (*inputs, *outputs, *decayed, steep, *chunks.place(scale))
    launch(_channel_scores_kernel, grid, args, wide, num_warps=tiles.num_warps, num_stages=1)
    tables = sum_tables(chunks.length, q), sum_tables(chunks.length, q, reads_before=True) if before else None
    args = (*inputs, *outputs, steep, *tables, *chunks.place(scale))
    launch(_steep_scores_kernel, grid, args, narrow, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    return scores
