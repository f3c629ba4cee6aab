"""What a walk needs under a diagonal decay, for all chunks at once: see ``channel_levels_triton`` for the derivation.

    P_ij = scale sum_c q_ic e^{G_ic - G_jc} k_jc  (j <= i)
    q reach = scale q e^{G}        k rest = k e^{G_C - G}        total = e^{G_C}

Work split: one program a (chunk, head); it goes over K in blocks. Bytes a token and head, 16-bit, K = 128, C = 64:
reads q, k and a float32 gate (1024), writes q reach, k rest, P and total (648). Floor: the reads and P.
Under erasures the same is made of their directions, in place of queries.
Shapes: B T HV K, R rows, C chunk. Oracle: ``decay.py``. Source: arXiv:2312.06635 section 4.3.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .channel_levels_triton import split_gate, sum_tables, sums
from .launch import launch
from .launch_config import Tiles, device_family, products_in
from .spans import Spans
from .tile_triton import load_rows, load_scalars, load_step, locate


@triton.jit(do_not_specialize=["T", "chunks_per_seq"])
def _channel_pairs_kernel(
    q_ptr,  # [tokens, HQ, K], or [rows, HQ, K] where QUERY_STEPS is 1
    k_ptr,  # [rows, HK, K]
    rate_ptr,  # factor on q, [rows, HV], or None
    log_decay_ptr,  # [tokens, HV, K]
    pairs_ptr,  # [chunks, HV, C, C]
    reach_ptr,  # [rows, HV, K]
    rest_ptr,  # [rows, HV, K], or None
    total_ptr,  # [chunks, HV, K] float32, or None
    table_ptr,  # sum_tables
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEVELS: tl.constexpr,
    STEPS: tl.constexpr,
    QUERY_STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid % HV).to(tl.int64)
    start, end, chunk = locate(
        pid // HV, chunks_ptr, T, chunks_per_seq, chunks_per_seq, CHUNK, CHUNK, chunks_ptr is not None
    )
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    valid = steps < end - start
    q_ptr += head // (HV // HQ) * K
    k_ptr += start * HK * K + head // (HV // HK) * K
    row = (start * HV + head) * K  # of the arrays with a row for every value head
    differ = steps[:, None] ^ steps[None, :]
    if rate_ptr is not None:
        rate = load_scalars(rate_ptr + start * HV + head, steps, valid, HV)[:, None] * scale
    else:
        rate = scale
    pairs = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=1):
        columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
        q = load_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, QUERY_STEPS, QUERY_STEPS - 1)
        k = load_rows(k_ptr, steps, valid, columns, HK * K, K, BLOCK_K)
        gate = load_step(log_decay_ptr + head * K, start, steps, valid, columns, HV * K, K, BLOCK_K, STEPS, 0)
        high, low = split_gate(gate, PRECISION)
        mask = valid[:, None]
        if K % BLOCK_K != 0:
            mask = mask & (columns < K)[None, :]
        offsets = steps[:, None] * (HV * K) + columns[None, :]
        if rest_ptr is not None:
            rest = tl.exp2(sums(table_ptr, LEVELS, high, low, CHUNK, PRECISION))
            tl.store(rest_ptr + row + offsets, (k * rest).to(k.dtype), mask=mask)
        up_to = sums(table_ptr, LEVELS + 1, high, low, CHUNK, PRECISION)
        tl.store(reach_ptr + row + offsets, (q * tl.exp2(up_to) * rate).to(q.dtype), mask=mask)
        if total_ptr is not None:
            place = total_ptr + (chunk * HV + head) * K + columns[None, :] + tl.zeros_like(steps)[:, None]
            tl.store(place, tl.exp2(up_to), mask=(steps == CHUNK - 1)[:, None] & (columns < K)[None, :])

        block_pairs = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # the diagonal stays, as no gate lies between
        for level in tl.range(LEVELS, num_stages=STAGES):
            factor = tl.exp2(sums(table_ptr, level, high, low, CHUNK, PRECISION))
            later, earlier = (q * factor).to(q.dtype), (k * factor).to(k.dtype)
            products = tl.dot(later, tl.trans(earlier), input_precision=PRECISION)
            # the rows of a pair differ first at its level: a higher level overwrites what a lower one put there
            block_pairs = tl.where(differ >= (1 << level), products, block_pairs)
        pairs += block_pairs

    pairs = tl.where(steps[:, None] >= steps[None, :], pairs * rate, 0.0)
    place = pairs_ptr + (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    tl.store(place, pairs.to(pairs_ptr.dtype.element_ty))


class ChannelPairs(NamedTuple):
    """q reach and k rest [B, R, HV, K], pairs [chunks, HV, C, C] and total [chunks, HV, K]; of erasures no k rest."""

    reach: Tensor
    rest: Tensor | None
    pairs: Tensor
    total: Tensor | None


def channel_pairs(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    num_steps: int = 1,
    is_exact: bool = False,
    erases: bool = False,
    rate: Tensor | None = None,
    reads_before: bool = False,
) -> ChannelPairs:
    """Prepare a diagonal decay; log_decay [B, T, HV, K]. Rows of no document stay unwritten.

    Args:
        chunks: in rows, of which a token has ``num_steps``: the first decays, the last has the query.
        is_exact: keep the pairs in float32.
        erases: q is a [B, R, HQ, K], a row a micro-step, scaled by ``rate`` [B, R, HV].
        reads_before: it meets the state before the decay of its own row.
    """
    (heads, key_dim), rows = log_decay.shape[-2:], (k.shape[0], k.shape[1])
    size = chunks.length
    result = ChannelPairs(
        q.new_empty(*rows, heads, key_dim),
        None if erases else q.new_empty(*rows, heads, key_dim),
        q.new_empty(chunks.count, heads, size, size, dtype=torch.float32 if is_exact else q.dtype),
        None if erases else q.new_empty(chunks.count, heads, key_dim, dtype=torch.float32),
    )
    launch(
        _channel_pairs_kernel,
        (chunks.count * heads,),
        (
            *(q, k, rate, log_decay, result.pairs, result.reach, result.rest, result.total),
            sum_tables(size, q, reads_before=reads_before),
            chunks.table,
            scale,
            chunks.seq_len,
            chunks.per_sequence,
        ),
        {
            "HQ": q.shape[2],
            "HK": k.shape[2],
            "HV": heads,
            "K": key_dim,
            "CHUNK": size,
            "BLOCK_K": tiles.block,
            "LEVELS": size.bit_length() - 1,
            "STEPS": num_steps,
            "QUERY_STEPS": 1 if erases else num_steps,
            "PRECISION": products_in(q.dtype, device_family(q.device)),
            "STAGES": tiles.num_stages,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return result
