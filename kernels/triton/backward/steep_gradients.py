"""Gradients of pairs of steep rows under a diagonal decay, by the levels of ``channel_factors``.

Added to what ``channel_gradients`` has made of everything else. At a level a row is either a query (of a later
half) or a key (of an earlier one), so with M the level's entries of dP and dP^T and X = E * (q or k), one product
D = M X holds the level's share of both gradients, E D, and of the gradient of every row's exponent, X D. That one is
spread over the gates in the exponent: each gate gets the pairs that it lies between, never a difference of larger sums.
Erasures are queries too: with a for q, rates r and -dR for dO.

Work split: ``_steep_products_kernel``, one program a (chunk, head), writes M of every level;
``_steep_gradients_kernel``, one program a (block of K, chunk, head), does the rest. Where no row is steep both return
at once. With M in registers the second spills, and so does one pass over the levels for queries and erasures.
Shapes: B T HO HV K V, HG heads of dO or dR (HO or HV), n micro-steps a token, R = T n rows, C chunk, L = log2 C levels.
Oracle: autograd through ``chunk.py``. Source: arXiv:2312.06635 section 4.3."""

import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.spans import Spans, ceil_div, power_of_2_from
from statemix.kernels.triton.primitives.channel_factors import (
    is_later,
    level_factors,
    split_gate,
    spread,
    spread_tables,
    sum_tables,
)
from statemix.kernels.triton.primitives.loads import load_rows, load_scalars, load_step, locate_chunk


@triton.jit(do_not_specialize=["T", "chunks_per_seq"])
def _steep_products_kernel(
    written_ptr,  # v or U, [rows, HV, V]
    grad_ptr,  # dO, [tokens, HG, V]; dR, [rows, HG, V], of erasures
    pairs_ptr,  # [chunks, HV, L, C, C]: M of each level
    steep_ptr,  # first steep row, [blocks of K, chunks, HV] int32
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    HG: tl.constexpr,
    HV: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS_K: tl.constexpr,
    LEVELS: tl.constexpr,
    QUERY_STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid % HV).to(tl.int64)
    start, end, chunk = locate_chunk(pid // HV, chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steep = CHUNK
    for block in tl.static_range(BLOCKS_K):
        steep = tl.minimum(steep, tl.load(steep_ptr + block * tl.num_programs(0) + chunk * HV + head))
    if steep == CHUNK:
        return
    steps = tl.arange(0, CHUNK)
    valid = steps < end - start
    written_ptr += (start * HV + head) * V
    grad_ptr += head // (HV // HG) * V
    pairs = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    pairs_t = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
        written = load_rows(written_ptr, steps, valid, columns, HV * V, V, BLOCK_V)
        grad = load_step(grad_ptr, start, steps, valid, columns, HG * V, V, BLOCK_V, QUERY_STEPS, QUERY_STEPS - 1)
        pairs = tl.dot(grad, tl.trans(written), pairs, input_precision=PRECISION)
        pairs_t = tl.dot(written, tl.trans(grad), pairs_t, input_precision=PRECISION)
    # dP below the diagonal and its transpose above it: a level needs both
    both = tl.where(steps[:, None] >= steps[None, :], pairs, pairs_t) * scale
    both = both.to(pairs_ptr.dtype.element_ty)
    differ = steps[:, None] ^ steps[None, :]
    place = pairs_ptr + (chunk * HV + head) * (LEVELS * CHUNK * CHUNK) + steps[:, None] * CHUNK + steps[None, :]
    for level in tl.static_range(LEVELS):
        tl.store(place + level * CHUNK * CHUNK, tl.where((differ >> level) == 1, both, 0.0))


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "rows"])
def _steep_gradients_kernel(
    q_ptr,  # [tokens, HQ, K]; a, [rows, HQ, K], of erasures
    k_ptr,  # [rows, HK, K]
    rate_ptr,  # factor on erasures, [rows, HV], or None
    log_decay_ptr,  # [tokens, HV, K]
    pairs_ptr,  # [chunks, HV, L, C, C] of _steep_products_kernel
    sums_ptr,  # sum_tables
    spread_ptr,  # spread_tables
    dq_ptr,  # [tokens, HV, K], or [rows, HV, K] of erasures; None where q is k, whose gradient then has both
    dk_ptr,  # [rows, HV, K]
    drate_ptr,  # [blocks of K, rows, HV] float32, or None
    dgate_ptr,  # [tokens, HV, K] float32
    steep_ptr,  # first steep row, [blocks of K, chunks, HV] int32
    chunks_ptr,  # [chunks, 4], or None for a batch
    T,
    chunks_per_seq,
    rows,
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
    SELECTS_POINTERS: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    block = pid % BLOCKS_K
    head = ((pid // BLOCKS_K) % HV).to(tl.int64)
    start, end, chunk = locate_chunk(pid // (BLOCKS_K * HV), chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steep = tl.load(steep_ptr + block * (tl.num_programs(0) // BLOCKS_K) + chunk * HV + head)
    if steep == CHUNK:
        return
    steps = tl.arange(0, CHUNK)
    valid = steps < end - start
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    scalars = start * HV + head
    tokens, query_rows = start + steps, (start + steps) // QUERY_STEPS
    mask = valid[:, None] & (columns < K)[None, :]
    mask_queries = mask & (tokens % QUERY_STEPS == QUERY_STEPS - 1)[:, None]
    q_rows = q_ptr + head // (HV // HQ) * K + query_rows[:, None] * (HQ * K)
    k_rows = k_ptr + (start * HK + head // (HV // HK)) * K + steps[:, None] * (HK * K)
    gate = load_step(log_decay_ptr + head * K, start, steps, valid, columns, HV * K, K, BLOCK_K, STEPS, 0)
    high, _ = split_gate(gate, PRECISION)
    place = pairs_ptr + (chunk * HV + head) * (LEVELS * CHUNK * CHUNK) + steps[:, None] * CHUNK + steps[None, :]
    is_left = (steps >= steep)[:, None] | (steps >= steep)[None, :]
    dgate = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    if dq_ptr is not None:
        dq = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    if rate_ptr is not None:
        rate = load_scalars(rate_ptr + scalars, steps, valid, HV)[:, None]
        drate = tl.zeros([CHUNK], dtype=tl.float32)
    # queries or keys are read anew at each level: held through the loop, they would spill
    for level in tl.range(LEVELS, num_stages=STAGES):
        later = is_later(steps, level)[:, None]
        share = later.to(tl.float32)
        if dq_ptr is None:
            x = tl.load(k_rows + columns[None, :], mask=mask, other=0.0)
        elif SELECTS_POINTERS:
            reads = mask_queries | (mask & (later == 0))
            x = tl.load(tl.where(later == 1, q_rows, k_rows) + columns[None, :], mask=reads, other=0.0)
        else:  # the compiler for AMD has no pointer that is one of two
            x = tl.load(q_rows + columns[None, :], mask=mask_queries & (later == 1), other=0.0)
            x += tl.load(k_rows + columns[None, :], mask=mask & (later == 0), other=0.0)
        pairs = tl.load(place + level * CHUNK * CHUNK, mask=is_left, other=0.0)
        factor = level_factors(sums_ptr, level, high, CHUNK, PRECISION)
        rates = 1.0
        if rate_ptr is not None:
            rates = 1.0 + share * (rate - 1.0)
        scaled = (x * (factor * rates)).to(dtype)
        # a later row takes the keys of the earlier half, an earlier row the queries of the later half
        d = tl.dot(pairs, scaled, input_precision=PRECISION)
        dgate = spread(spread_ptr, level, scaled * d, dgate, CHUNK, PRECISION)
        d *= factor
        if rate_ptr is not None:
            drate += tl.sum(x * (d * share), axis=1)
        if dq_ptr is None:
            dk += d * rates
        else:
            dq += d * share
            dk += d * (1.0 - share)

    if rate_ptr is not None:
        drate_place = drate_ptr + (block.to(tl.int64) * rows + tokens) * HV + head
        tl.store(drate_place, drate + tl.load(drate_place, mask=valid, other=0.0), mask=valid)
    if dq_ptr is not None:
        if rate_ptr is not None:
            dq *= rate
        dq_place = dq_ptr + (query_rows * HV + head)[:, None] * K + columns[None, :]
        dq += tl.load(dq_place, mask=mask_queries, other=0.0)
        tl.store(dq_place, dq.to(dtype), mask=mask_queries)
    dk_place = dk_ptr + scalars * K + steps[:, None] * (HV * K) + columns[None, :]
    dk += tl.load(dk_place, mask=mask, other=0.0)
    tl.store(dk_place, dk.to(dtype), mask=mask)
    gate_place = dgate_ptr + ((tokens // STEPS) * HV + head)[:, None] * K + columns[None, :]
    mask_gate = mask & (tokens % STEPS == 0)[:, None]
    dgate += tl.load(gate_place, mask=mask_gate, other=0.0)
    tl.store(gate_place, dgate, mask=mask_gate)


def add_steep_gradients(
    q: Tensor,
    k: Tensor,
    written: Tensor,
    rate: Tensor | None,
    log_decay: Tensor,
    grad: Tensor,
    to: tuple[Tensor | None, Tensor, Tensor | None, Tensor],
    steep: Tensor,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    num_steps: int,
    query_steps: int = 1,
    reads_before: bool = False,
) -> None:
    """Add to the gradients of q, k, rate and gate, ``to``; a, rate and dR are those of erasures.

    Args:
        written: v or U.
        steep: the first steep row of each chunk, a block of K of ``tiles`` and a head at a time.
        query_steps: micro-steps of which one has a query: 1 of erasures.
    """
    heads, value_dim, key_dim, size = written.shape[2], written.shape[3], k.shape[-1], chunks.length
    levels, blocks = size.bit_length() - 1, ceil_div(key_dim, tiles.block)
    pairs = q.new_empty(chunks.count, heads, levels, size, size)
    sizes = {
        "HV": heads,
        "CHUNK": size,
        "LEVELS": levels,
        "QUERY_STEPS": query_steps,
        "PRECISION": products_in(q.dtype, device_arch(q.device)),
    }
    place = (chunks.seq_len, chunks.per_sequence)
    launch(
        _steep_products_kernel,
        (chunks.count * heads,),
        (written, grad, pairs, steep, chunks.table, scale, *place),
        {
            **sizes,
            "HG": grad.shape[2],
            "V": value_dim,
            "BLOCK_V": min(2 * tiles.block, max(tiles.block, power_of_2_from(value_dim))),
            "BLOCKS_K": blocks,
        },
        num_warps=4,
        num_stages=1,
    )
    launch(
        _steep_gradients_kernel,
        (chunks.count * heads * blocks,),
        (
            *(q, k, rate, log_decay, pairs),
            sum_tables(size, q, reads_before=reads_before),
            spread_tables(size, q, reads_before=reads_before),
            *(*to, steep, chunks.table, *place, k.shape[0] * k.shape[1]),
        ),
        {
            **sizes,
            "HQ": q.shape[2],
            "HK": k.shape[2],
            "K": key_dim,
            "BLOCK_K": tiles.block,
            "STEPS": num_steps,
            "SELECTS_POINTERS": device_arch(q.device) != "gfx942",
            "STAGES": tiles.num_stages,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
