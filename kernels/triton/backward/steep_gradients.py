"""Gradients of scores of steep micro-steps under a diagonal decay, by the levels of ``channel_factors``.

Added to what ``channel_gradients`` has made of everything else. At a level a micro-step is either a query (of a later
half) or a key (of an earlier one), so with M the level's entries of dA_qk and its transpose and X = E * (q or k), one
product D = M X holds the level's share of both gradients, E D, and of the gradient of every exponent, X D. That one is
spread over the gates in the exponent: each gate gets the scores that it lies between, never a difference of larger
sums. Erase directions are queries too: with a for q, erase beta, dA_kk for dA_qk and -dR for dO.

Work split: ``_steep_score_gradients_kernel``, one program a (chunk, head), writes M of every level;
``_steep_gradients_kernel``, one program a (block of K, chunk, head), does the rest. Where no micro-step is steep both
return at once. With M in registers the second spills, and so does one pass over the levels for queries and erase
directions.
Shapes: B T HO HV K V, HG heads of dO or dR (HO or HV), n micro-steps a token, C chunk, log2 C levels.
Oracle: autograd through ``chunk.py``. Source: arXiv:2312.06635 section 4.3.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.spans import Spans
from statemix.kernels.triton.primitives.channel_factors import (
    is_later,
    level_factors,
    split_gate,
    spread,
    spread_tables,
    sum_tables,
)
from statemix.kernels.triton.primitives.loads import load_scalars, load_sub_step, load_tile, locate_chunk
from statemix.kernels.triton.primitives.sizes import wide_block


@triton.jit(do_not_specialize=["T", "chunks_per_seq"])
def _steep_score_gradients_kernel(
    u_ptr,  # v or U, [micro_steps, HV, V]
    grad_ptr,  # dO, [tokens, HG, V]; dR, [micro_steps, HG, V], of erase directions
    dA_ptr,  # [chunks, HV, LEVELS, C, C]: M of each level
    steep_ptr,  # first steep micro-step, [blocks of K, chunks, HV] int32
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
    QUERY_SUB_STEPS: tl.constexpr,
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
    u_ptr += (start * HV + head) * V
    grad_ptr += head // (HV // HG) * V
    dA = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dA_t = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
        u = load_tile(u_ptr, steps, valid, columns, HV * V, V, BLOCK_V)
        grad = load_sub_step(
            grad_ptr, start, steps, valid, columns, HG * V, V, BLOCK_V, QUERY_SUB_STEPS, QUERY_SUB_STEPS - 1
        )
        dA = tl.dot(grad, tl.trans(u), dA, input_precision=PRECISION)
        dA_t = tl.dot(u, tl.trans(grad), dA_t, input_precision=PRECISION)
    # dA_qk below the diagonal and its transpose above it: a level needs both
    both = tl.where(steps[:, None] >= steps[None, :], dA, dA_t) * scale
    both = both.to(dA_ptr.dtype.element_ty)
    differ = steps[:, None] ^ steps[None, :]
    place = dA_ptr + (chunk * HV + head) * (LEVELS * CHUNK * CHUNK) + steps[:, None] * CHUNK + steps[None, :]
    for level in tl.static_range(LEVELS):
        tl.store(place + level * CHUNK * CHUNK, tl.where((differ >> level) == 1, both, 0.0))


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "micro_steps"])
def _steep_gradients_kernel(
    q_ptr,  # [tokens, HQ, K]; a, [micro_steps, HQ, K], of erase directions
    k_ptr,  # [micro_steps, HK, K]
    erase_beta_ptr,  # of erase directions, [micro_steps, HV], or None
    log_decay_ptr,  # [tokens, HV, K]
    dA_ptr,  # [chunks, HV, LEVELS, C, C] of _steep_score_gradients_kernel
    sums_ptr,  # sum_tables
    spread_ptr,  # spread_tables
    dq_ptr,  # [tokens, HV, K]; [micro_steps, HV, K] of erase directions, None where a is b: dk has both
    dk_ptr,  # [micro_steps, HV, K]
    d_erase_beta_ptr,  # [blocks of K, micro_steps, HV] float32, or None
    dgate_ptr,  # [tokens, HV, K] float32
    steep_ptr,  # first steep micro-step, [blocks of K, chunks, HV] int32
    chunks_ptr,  # [chunks, 4], or None for a batch
    T,
    chunks_per_seq,
    micro_steps,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEVELS: tl.constexpr,
    SUB_STEPS: tl.constexpr,
    QUERY_SUB_STEPS: tl.constexpr,
    PRECISION: tl.constexpr,
    SELECTS_POINTERS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """28 parameters: eight inputs, four gradients and their sizes: one product a level holds the share of all four."""
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
    tokens, query_rows = start + steps, (start + steps) // QUERY_SUB_STEPS
    mask = valid[:, None] & (columns < K)[None, :]
    mask_queries = mask & (tokens % QUERY_SUB_STEPS == QUERY_SUB_STEPS - 1)[:, None]
    q_rows = q_ptr + head // (HV // HQ) * K + query_rows[:, None] * (HQ * K)
    k_rows = k_ptr + (start * HK + head // (HV // HK)) * K + steps[:, None] * (HK * K)
    gate = load_sub_step(log_decay_ptr + head * K, start, steps, valid, columns, HV * K, K, BLOCK_K, SUB_STEPS, 0)
    high, _ = split_gate(gate, PRECISION)
    place = dA_ptr + (chunk * HV + head) * (LEVELS * CHUNK * CHUNK) + steps[:, None] * CHUNK + steps[None, :]
    is_left = (steps >= steep)[:, None] | (steps >= steep)[None, :]
    dgate = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    if dq_ptr is not None:
        dq = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    if erase_beta_ptr is not None:
        erase_beta = load_scalars(erase_beta_ptr + scalars, steps, valid, HV)[:, None]
        d_erase_beta = tl.zeros([CHUNK], dtype=tl.float32)
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
        dA = tl.load(place + level * CHUNK * CHUNK, mask=is_left, other=0.0)
        factor = level_factors(sums_ptr, level, high, CHUNK, PRECISION)
        betas = 1.0
        if erase_beta_ptr is not None:
            betas = 1.0 + share * (erase_beta - 1.0)
        scaled = (x * (factor * betas)).to(dtype)
        # a later one takes the keys of the earlier half, an earlier one the queries of the later half
        d = tl.dot(dA, scaled, input_precision=PRECISION)
        dgate = spread(spread_ptr, level, scaled * d, dgate, CHUNK, PRECISION)
        d *= factor
        if erase_beta_ptr is not None:
            d_erase_beta += tl.sum(x * (d * share), axis=1)
        if dq_ptr is None:
            dk += d * betas
        else:
            dq += d * share
            dk += d * (1.0 - share)

    if erase_beta_ptr is not None:
        d_erase_beta_place = d_erase_beta_ptr + (block.to(tl.int64) * micro_steps + tokens) * HV + head
        tl.store(d_erase_beta_place, d_erase_beta + tl.load(d_erase_beta_place, mask=valid, other=0.0), mask=valid)
    if dq_ptr is not None:
        if erase_beta_ptr is not None:
            dq *= erase_beta
        dq_place = dq_ptr + (query_rows * HV + head)[:, None] * K + columns[None, :]
        dq += tl.load(dq_place, mask=mask_queries, other=0.0)
        tl.store(dq_place, dq.to(dtype), mask=mask_queries)
    dk_place = dk_ptr + scalars * K + steps[:, None] * (HV * K) + columns[None, :]
    dk += tl.load(dk_place, mask=mask, other=0.0)
    tl.store(dk_place, dk.to(dtype), mask=mask)
    gate_place = dgate_ptr + ((tokens // SUB_STEPS) * HV + head)[:, None] * K + columns[None, :]
    mask_gate = mask & (tokens % SUB_STEPS == 0)[:, None]
    dgate += tl.load(gate_place, mask=mask_gate, other=0.0)
    tl.store(gate_place, dgate, mask=mask_gate)


def add_steep_gradients(
    q: Tensor,
    k: Tensor,
    u: Tensor,
    erase_beta: Tensor | None,
    log_decay: Tensor,
    grad: Tensor,
    outputs: tuple[Tensor | None, Tensor, Tensor | None, Tensor],
    steep: Tensor,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    sub_steps: int,
    query_sub_steps: int = 1,
    reads_before: bool = False,
) -> None:
    """Add to the gradients of q, k, erase beta and gate, ``outputs``; of erase pairs q is a, and ``grad`` dR.

    Args:
        u: U, or v without erase pairs.
        steep: the first steep micro-step of each chunk, a block of K of ``tiles`` and a head at a time.
        query_sub_steps: sub-steps of which one has a query: 1 of erase pairs.
    """
    heads, size, levels, blocks = u.shape[2], chunks.length, chunks.length.bit_length() - 1, steep.shape[0]
    dA = q.new_empty(chunks.count, heads, levels, size, size)
    tables = (make(size, q, reads_before=reads_before) for make in (sum_tables, spread_tables))
    constants = {
        "HQ": q.shape[2],
        "HK": k.shape[2],
        "HG": grad.shape[2],
        "HV": heads,
        "K": k.shape[-1],
        "V": u.shape[-1],
        "CHUNK": size,
        "BLOCK_K": tiles.block,
        "BLOCK_V": wide_block(tiles, u.shape[-1]),
        "BLOCKS_K": blocks,
        "LEVELS": levels,
        "SUB_STEPS": sub_steps,
        "QUERY_SUB_STEPS": query_sub_steps,
        "PRECISION": products_in(q.dtype, device_arch(q.device)),
        "SELECTS_POINTERS": device_arch(q.device) != "gfx942",
        "STAGES": tiles.num_stages,
    }
    args: tuple[Any, ...] = (u, grad, dA, steep, *chunks.place(scale))
    launch(_steep_score_gradients_kernel, (chunks.count * heads,), args, constants, num_warps=4, num_stages=1)
    place = (chunks.table, chunks.seq_len, chunks.per_sequence, k.shape[0] * k.shape[1])
    args = (q, k, erase_beta, log_decay, dA, *tables, *outputs, steep, *place)
    warps, stages = tiles.num_warps, tiles.num_stages
    grid = (chunks.count * heads * blocks,)
    launch(_steep_gradients_kernel, grid, args, constants, num_warps=warps, num_stages=stages)
