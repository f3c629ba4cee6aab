"""Gradients under a diagonal decay, for all chunks at once; ``channel_levels_triton`` derives the levels.

    dq = scale (dO S) reach + dP k          dk = (v dS) rest + dP^T q          dP = scale lower(dO v^T) e^L

At a level a row is either a query (of a later half) or a key (of an earlier one), so with M the level's entries of dP
and dP^T and X = E * (q or k), one product D = M X holds the level's share of both gradients, E D, and of the gradient
of every row's exponent, X D. That one is spread over the gates in the exponent: each gate gets the pairs that it lies
between, never a difference of larger sums.

Erasures of the delta family are queries too: with a for q, rates r, U for v and -dR for dO the same kernels give

    dA = -strictly_lower(dR U^T) e^L        x = -(dR S) reach + dA b        da = r x        dr = x^T a

and the share of b in dA; they write nothing to the state, so dS has no part.

Work split: ``_level_pairs_kernel``, one program a (chunk, head), writes M of every level;
``_channel_gradients_kernel``, one program a (block of K, chunk, head), does the rest. With M in registers the second
spills: 1.23 ms on an H200 at B8 T2048 H16 D128, against 0.79 and 0.09 for the two.
Bytes a token and head, 16-bit, K = V = 128, C = 64: v and dO read (512), M written (896); then q, k, v, dO, S, dS and a
float32 gate read (2560), M once a block of K (1792), dq, dk and a float32 gate gradient written (1024). Floor: 3584.
The run for erasures has no dS (512 less).
Shapes: B T HV K V, C chunk, L = log2 C levels. Oracle: autograd through ``chunk.py``.
Source: arXiv:2312.06635 section 4.3.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .channel_levels_triton import is_later, level_factors, split_gate, spread, spread_tables, sum_tables, sums
from .launch import launch
from .launch_config import Tiles, device_family, products_in
from .spans import Spans, ceil_div, power_of_2_from
from .tile_triton import load_rows, load_scalars, load_step, locate


@triton.jit(do_not_specialize=["T", "chunks_per_seq"])
def _level_pairs_kernel(
    v_ptr,  # [rows, HV, V]
    grad_ptr,  # dO, [tokens, HV, V], or [rows, HV, V] where QUERY_STEPS is 1
    pairs_ptr,  # [chunks, HV, L + 1, C, C]: M of each level, and the pairs of a row with itself
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    HV: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LEVELS: tl.constexpr,
    QUERY_STEPS: tl.constexpr,
    ERASES: tl.constexpr,
    PRECISION: tl.constexpr,
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
    row = (start * HV + head) * V
    pairs = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    pairs_t = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
        v = load_rows(v_ptr + row, steps, valid, columns, HV * V, V, BLOCK_V)
        grad = load_step(
            grad_ptr + head * V, start, steps, valid, columns, HV * V, V, BLOCK_V, QUERY_STEPS, QUERY_STEPS - 1
        )
        pairs = tl.dot(grad, tl.trans(v), pairs, input_precision=PRECISION)
        pairs_t = tl.dot(v, tl.trans(grad), pairs_t, input_precision=PRECISION)
    # dP below the diagonal and its transpose above it: a level needs both
    both = tl.where(steps[:, None] >= steps[None, :], pairs, pairs_t) * scale
    both = both.to(pairs_ptr.dtype.element_ty)
    differ = steps[:, None] ^ steps[None, :]
    place = pairs_ptr + (chunk * HV + head) * ((LEVELS + 1) * CHUNK * CHUNK) + steps[:, None] * CHUNK + steps[None, :]
    for level in tl.static_range(LEVELS):
        tl.store(place + level * CHUNK * CHUNK, tl.where((differ >> level) == 1, both, 0.0))
    if not ERASES:  # an erasure does not meet its own row
        tl.store(place + LEVELS * CHUNK * CHUNK, tl.where(differ == 0, both, 0.0))


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "rows"])
def _channel_gradients_kernel(
    q_ptr,  # [tokens, HQ, K], or [rows, HQ, K] where QUERY_STEPS is 1
    k_ptr,  # [rows, HK, K]
    v_ptr,  # [rows, HV, V]
    grad_ptr,  # dO, [tokens, HV, V], or [rows, HV, V] where QUERY_STEPS is 1
    rate_ptr,  # factor on q, [rows, HV], or None
    log_decay_ptr,  # [tokens, HV, K]
    pairs_ptr,  # [chunks, HV, L + 1, C, C] of _level_pairs_kernel
    states_ptr,  # S at chunk starts, [chunks, HV, K, V]
    grad_states_ptr,  # dS at chunk ends, [chunks, HV, K, V]; None of erasures, which write nothing
    sums_ptr,  # sum_tables
    spread_ptr,  # spread_tables
    dq_ptr,  # [tokens, HV, K], or [rows, HV, K] where QUERY_STEPS is 1
    dk_ptr,  # [rows, HV, K]
    drate_ptr,  # [blocks of K, HV, rows] float32, or None
    dgate_ptr,  # [tokens, HV, K] float32
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    rows,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LEVELS: tl.constexpr,
    STEPS: tl.constexpr,
    QUERY_STEPS: tl.constexpr,
    ERASES: tl.constexpr,
    PRECISION: tl.constexpr,
    SELECTS_POINTERS: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    head = ((pid // BLOCKS_K) % HV).to(tl.int64)
    start, end, chunk = locate(
        pid // (BLOCKS_K * HV), chunks_ptr, T, chunks_per_seq, chunks_per_seq, CHUNK, CHUNK, chunks_ptr is not None
    )
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    valid = steps < end - start
    columns = (pid % BLOCKS_K) * BLOCK_K + tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    q_ptr += head // (HV // HQ) * K
    k_ptr += (start * HK + head // (HV // HK)) * K
    v_ptr += (start * HV + head) * V
    grad_ptr += head * V
    tokens, query_rows = start + steps, (start + steps) // QUERY_STEPS
    row = (start * HV + head) * K  # of the arrays with a row for every value head
    mask = valid[:, None] & (columns < K)[None, :]
    mask_queries = mask & (tokens % QUERY_STEPS == QUERY_STEPS - 1)[:, None]

    gate = load_step(log_decay_ptr + head * K, start, steps, valid, columns, HV * K, K, BLOCK_K, STEPS, 0)
    high, _ = split_gate(gate, PRECISION)
    k = load_rows(k_ptr, steps, valid, columns, HK * K, K, BLOCK_K)
    place = pairs_ptr + (chunk * HV + head) * ((LEVELS + 1) * CHUNK * CHUNK) + steps[:, None] * CHUNK + steps[None, :]
    q_rows = q_ptr + query_rows[:, None] * (HQ * K)
    k_rows = k_ptr + steps[:, None] * (HK * K)
    if ERASES:
        dq = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        dk = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    else:
        q = tl.load(q_rows + columns[None, :], mask=mask_queries, other=0.0)
        own = tl.load(place + LEVELS * CHUNK * CHUNK)
        dq = tl.dot(own, k, input_precision=PRECISION)
        dk = tl.dot(own, q, input_precision=PRECISION)
    dgate = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    rate = load_scalars(rate_ptr + start * HV + head, steps, valid, HV)[:, None] if rate_ptr is not None else 1.0
    # queries or keys are read anew at each level: held through the loop, they would spill
    for level in tl.range(LEVELS, num_stages=STAGES):
        later = is_later(steps, level)[:, None]
        if SELECTS_POINTERS:
            reads = mask_queries | (mask & (later == 0))
            x = tl.load(tl.where(later == 1, q_rows, k_rows) + columns[None, :], mask=reads, other=0.0)
        else:  # the compiler for AMD has no pointer that is one of two
            x = tl.load(q_rows + columns[None, :], mask=mask_queries & (later == 1), other=0.0)
            x += tl.load(k_rows + columns[None, :], mask=mask & (later == 0), other=0.0)
        pairs = tl.load(place + level * CHUNK * CHUNK)
        factor = level_factors(sums_ptr, level, high, CHUNK, PRECISION)
        if rate_ptr is not None:
            x = x * tl.where(later == 1, rate, 1.0)
        x = (x * factor).to(dtype)
        # a later row takes the keys of the earlier half, an earlier row the queries of the later half
        d = tl.dot(pairs, x, input_precision=PRECISION)
        dgate = spread(spread_ptr, level, x * d, dgate, CHUNK, PRECISION)
        d *= factor
        later = later.to(tl.float32)
        dq += d * later
        dk += d * (1.0 - later)

    # the states last, through one temporary
    state_offset = (chunk * HV + head) * K * V + columns[:, None] * V
    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for block in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        v_columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = (columns < K)[:, None] & (v_columns < V)[None, :]
        grad = load_step(grad_ptr, start, steps, valid, v_columns, HV * V, V, BLOCK_V, QUERY_STEPS, QUERY_STEPS - 1)
        state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(grad, tl.trans(state), from_state, input_precision=PRECISION)
    gate = load_step(log_decay_ptr + head * K, start, steps, valid, columns, HV * K, K, BLOCK_K, STEPS, 0)
    high, low = split_gate(gate, PRECISION)
    reach = sums(sums_ptr, LEVELS + 1, high, low, CHUNK, PRECISION)
    total = tl.exp2(tl.sum(tl.where((steps == CHUNK - 1)[:, None], reach, 0.0), axis=0))
    from_state *= tl.exp2(reach) * scale
    dq += from_state
    q = tl.load(q_rows + columns[None, :], mask=mask_queries, other=0.0).to(tl.float32)
    if drate_ptr is not None:
        place = drate_ptr + ((pid % BLOCKS_K) * HV + head) * rows + tokens
        tl.store(place, tl.sum(q * dq, axis=1), mask=valid)
    if rate_ptr is not None:
        dq *= rate
        q *= rate
    query_place = dq_ptr + (query_rows * HV + head)[:, None] * K + columns[None, :]
    tl.store(query_place, dq.to(dtype), mask=mask_queries)
    dgate = spread(spread_ptr, LEVELS + 1, q * from_state, dgate, CHUNK, PRECISION)

    offsets = row + steps[:, None] * (HV * K) + columns[None, :]
    if grad_states_ptr is not None:
        from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        kept = tl.zeros([BLOCK_K, BLOCK_K], dtype=tl.float32)  # its diagonal is the sum over V of S dS
        for block in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
            v_columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
            mask_state = (columns < K)[:, None] & (v_columns < V)[None, :]
            v = load_rows(v_ptr, steps, valid, v_columns, HV * V, V, BLOCK_V)
            state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
            grad_state = tl.load(grad_states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
            from_state = tl.dot(v, tl.trans(grad_state), from_state, input_precision=PRECISION)
            kept = tl.dot(grad_state, tl.trans(state), kept, input_precision=PRECISION)
        from_state *= tl.exp2(sums(sums_ptr, LEVELS, high, low, CHUNK, PRECISION))
        dk += from_state
        k = load_rows(k_ptr, steps, valid, columns, HK * K, K, BLOCK_K)
        dgate = spread(spread_ptr, LEVELS, k * from_state, dgate, CHUNK, PRECISION)
        channels = tl.arange(0, BLOCK_K)
        kept = tl.sum(tl.where(channels[:, None] == channels[None, :], kept, 0.0), axis=0)
        dgate += (total * kept)[None, :]
    tl.store(dk_ptr + offsets, dk.to(dtype), mask=mask)
    gate_place = dgate_ptr + ((tokens // STEPS) * HV + head)[:, None] * K + columns[None, :]
    tl.store(gate_place, dgate, mask=mask & (tokens % STEPS == 0)[:, None])


class ChannelGradients(NamedTuple):
    """dq [B, T or R, HV, K], dk [B, R, HV, K]; float32 drate, None or [blocks, HV, B R], and dgate [B, T, HV, K]."""

    q: Tensor
    k: Tensor
    rate: Tensor | None
    gate: Tensor


def channel_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    grad: Tensor,
    states: Tensor,
    grad_states: Tensor | None,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    num_steps: int = 1,
    rate: Tensor | None = None,
    reads_before: bool = False,
) -> ChannelGradients:
    """Gradients of every query, key and gate, one a value head; rows of no document get zeros.

    Args:
        grad_states: None where q is a of erasures [B, R, HQ, K], scaled by ``rate``: those write nothing to the state.
        chunks: in rows, of which a token has ``num_steps``: the first decays, the last has the query.
        reads_before: erasures meet the state before the decay of their own row.
    """
    heads, value_dim, key_dim, size = v.shape[2], v.shape[3], q.shape[-1], chunks.length
    num_rows, levels, erases = k.shape[0] * k.shape[1], chunks.length.bit_length() - 1, grad_states is None
    block_v = min(2 * tiles.block, max(tiles.block, power_of_2_from(value_dim)))
    pairs = q.new_empty(chunks.count, heads, levels + 1, size, size)
    sizes = {
        "HV": heads,
        "V": value_dim,
        "CHUNK": size,
        "BLOCK_V": block_v,
        "LEVELS": levels,
        "QUERY_STEPS": 1 if erases else num_steps,
        "ERASES": erases,
        "PRECISION": products_in(q.dtype, device_family(q.device)),
    }
    place = (chunks.table, scale, chunks.seq_len, chunks.per_sequence)
    launch(_level_pairs_kernel, (chunks.count * heads,), (v, grad, pairs, *place), sizes, num_warps=4, num_stages=1)
    blocks = ceil_div(key_dim, tiles.block)

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        return (q.new_empty if chunks.table is None else q.new_zeros)(shape, dtype=dtype)

    made = ChannelGradients(
        make(*q.shape[:2], heads, key_dim, dtype=q.dtype),
        make(*k.shape[:2], heads, key_dim, dtype=q.dtype),
        None if rate is None else make(blocks, heads, num_rows, dtype=torch.float32),
        make(*log_decay.shape, dtype=torch.float32),
    )
    launch(
        _channel_gradients_kernel,
        (chunks.count * heads * blocks,),
        (
            *(q, k, v, grad, rate, log_decay, pairs, states, grad_states),
            sum_tables(size, q, reads_before=reads_before),
            spread_tables(size, q, reads_before=reads_before),
            *made,
            *place,
            num_rows,
        ),
        {
            **sizes,
            "HQ": q.shape[2],
            "HK": k.shape[2],
            "K": key_dim,
            "BLOCK_K": tiles.block,
            "STEPS": num_steps,
            "SELECTS_POINTERS": device_family(q.device) != "gfx942",
            "STAGES": tiles.num_stages,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return made
