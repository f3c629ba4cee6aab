"""Gradients under a diagonal decay, for all chunks at once; ``channel_levels_triton`` derives the levels.

    dq = scale (dO S) reach + dP k          dk = (v dS) rest + dP^T q          dP = scale lower(dO v^T) e^L

At a level a row is either a query (of a later half) or a key (of an earlier one), so with M the level's entries of dP
and dP^T and X = E * (q or k), one product D = M X holds the level's share of both gradients, E D, and of the gradient
of every row's exponent, X D. That one is spread over the gates in the exponent: each gate gets the pairs that it lies
between, never a difference of larger sums.

Erasures of the delta family are queries too: with a for q, rates r, U for v and -dR for dO the same kernels give

    dA = -strictly_lower(dR U^T) e^L        x = -(dR S) reach + dA b        da = r x        dr = x^T a
    dv = w dR                               dw = v^T dR

and add the share of b in dA, and of gates, to what the queries gave them. They write nothing to the state, so dS has no
part. Where a is b, da goes to b at once.

Work split: ``_level_pairs_kernel``, one program a (chunk, head), writes M of every level, and dv and dw;
``_channel_gradients_kernel``, one program a (block of K, chunk, head), does the rest. With M in registers the second
spills: 1.23 ms on an H200 at B8 T2048 H16 D128, against 0.79 and 0.09 for the two. So do queries and erasures in one
pass over the levels, whose exponents they share: 1.68 against 0.86 and 0.56.
Bytes a row and head, 16-bit, K = V = 128, C = 64: v and dO read (512), M written (896); then q, k, v, dO, S, dS and a
float32 gate read (2560), M once a block of K (1792), dq, dk and a float32 gate gradient written (1024). Floor: 3584.
The run for erasures has no dS (512 less), reads v, db and the gate's gradient (1024) and writes dv (256).
Shapes: B T HO HV K V, HG heads of dO or dR (HO or HV), n micro-steps a token, R = T n rows, C chunk, L = log2 C levels.
Oracle: autograd through ``chunk.py``. Source: arXiv:2312.06635 section 4.3.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .channel_levels_triton import is_later, level_factors, split_gate, spread, spread_tables, sum_tables, sums
from .launch import launch
from .launch_config import Tiles, device_family, products_in
from .operands import ScanOperands
from .spans import Spans, ceil_div, power_of_2_from
from .tile_triton import load_rows, load_scalars, load_step, locate_chunk, store_value_gradients


@triton.jit(do_not_specialize=["T", "chunks_per_seq"])
def _level_pairs_kernel(
    written_ptr,  # v or U, [rows, HV, V]
    grad_ptr,  # dO, [tokens, HG, V]; dR, [rows, HG, V], of erasures
    v_ptr,  # [rows, HO, V]; this and the next three are None but for erasures with a weight
    weight_ptr,  # [rows, HV]
    dv_ptr,  # [rows, HV, V]
    dweight_ptr,  # [rows, HV]
    pairs_ptr,  # [chunks, HV, L + 1, C, C]: M of each level, and the pairs of a row with itself
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    HG: tl.constexpr,
    HO: tl.constexpr,
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
    start, end, chunk = locate_chunk(pid // HV, chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    valid = steps < end - start
    scalars = start * HV + head
    grad_ptr += head // (HV // HG) * V
    if weight_ptr is not None:
        weight = load_scalars(weight_ptr + scalars, steps, valid, HV)
        dweight = tl.zeros([CHUNK], dtype=tl.float32)
    pairs = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    pairs_t = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
        written = load_rows(written_ptr + scalars * V, steps, valid, columns, HV * V, V, BLOCK_V)
        grad = load_step(grad_ptr, start, steps, valid, columns, HG * V, V, BLOCK_V, QUERY_STEPS, QUERY_STEPS - 1)
        pairs = tl.dot(grad, tl.trans(written), pairs, input_precision=PRECISION)
        pairs_t = tl.dot(written, tl.trans(grad), pairs_t, input_precision=PRECISION)
        if weight_ptr is not None:
            dweight += store_value_gradients(grad, v_ptr, dv_ptr, weight, start, head, steps, valid, columns, HO, HV, V)
    if weight_ptr is not None:
        tl.store(dweight_ptr + scalars + steps * HV, dweight.to(dweight_ptr.dtype.element_ty), mask=valid)
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
    q_ptr,  # [tokens, HQ, K]; a, [rows, HQ, K], of erasures
    k_ptr,  # [rows, HK, K]
    v_ptr,  # v or U, [rows, HV, V]
    grad_ptr,  # dO, [tokens, HG, V]; dR, [rows, HG, V], of erasures
    rate_ptr,  # factor on erasures, [rows, HV], or None
    log_decay_ptr,  # [tokens, HV, K]
    pairs_ptr,  # [chunks, HV, L + 1, C, C] of _level_pairs_kernel
    states_ptr,  # S at chunk starts, [chunks, HV, K, V]
    grad_states_ptr,  # dS at chunk ends, [chunks, HV, K, V]; None of erasures, which write nothing
    sums_ptr,  # sum_tables
    spread_ptr,  # spread_tables
    dq_ptr,  # [tokens, HV, K], or [rows, HV, K] of erasures; None where q is k, whose gradient then has both
    dk_ptr,  # [rows, HV, K]; erasures add to it
    drate_ptr,  # [blocks of K, rows, HV] float32, or None
    dgate_ptr,  # [tokens, HV, K] float32; erasures add to it
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    rows,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HG: tl.constexpr,
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
    start, end, chunk = locate_chunk(pid // (BLOCKS_K * HV), chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    valid = steps < end - start
    columns = (pid % BLOCKS_K) * BLOCK_K + tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    q_ptr += head // (HV // HQ) * K
    k_ptr += (start * HK + head // (HV // HK)) * K
    scalars = start * HV + head
    v_ptr += scalars * V
    grad_ptr += head // (HV // HG) * V
    tokens, query_rows = start + steps, (start + steps) // QUERY_STEPS
    mask = valid[:, None] & (columns < K)[None, :]
    mask_queries = mask & (tokens % QUERY_STEPS == QUERY_STEPS - 1)[:, None]

    gate = load_step(log_decay_ptr + head * K, start, steps, valid, columns, HV * K, K, BLOCK_K, STEPS, 0)
    high, _ = split_gate(gate, PRECISION)
    k = load_rows(k_ptr, steps, valid, columns, HK * K, K, BLOCK_K)
    place = pairs_ptr + (chunk * HV + head) * ((LEVELS + 1) * CHUNK * CHUNK) + steps[:, None] * CHUNK + steps[None, :]
    q_rows = q_ptr + query_rows[:, None] * (HQ * K)
    k_rows = k_ptr + steps[:, None] * (HK * K)
    if ERASES:
        dk = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        if dq_ptr is not None:
            dq = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    else:
        q = tl.load(q_rows + columns[None, :], mask=mask_queries, other=0.0)
        own = tl.load(place + LEVELS * CHUNK * CHUNK)
        dq = tl.dot(own, k, input_precision=PRECISION)
        dk = tl.dot(own, q, input_precision=PRECISION)
    dgate = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
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
        pairs = tl.load(place + level * CHUNK * CHUNK)
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

    # the states last, through one temporary
    state_offset = (chunk * HV + head) * K * V + columns[:, None] * V
    from_state = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    for block in tl.static_range((V + BLOCK_V - 1) // BLOCK_V):
        v_columns = block * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_state = (columns < K)[:, None] & (v_columns < V)[None, :]
        grad = load_step(grad_ptr, start, steps, valid, v_columns, HG * V, V, BLOCK_V, QUERY_STEPS, QUERY_STEPS - 1)
        state = tl.load(states_ptr + state_offset + v_columns[None, :], mask=mask_state, other=0.0)
        from_state = tl.dot(grad, tl.trans(state), from_state, input_precision=PRECISION)
    gate = load_step(log_decay_ptr + head * K, start, steps, valid, columns, HV * K, K, BLOCK_K, STEPS, 0)
    high, low = split_gate(gate, PRECISION)
    reach = sums(sums_ptr, LEVELS + 1, high, low, CHUNK, PRECISION)
    total = tl.exp2(tl.sum(tl.where((steps == CHUNK - 1)[:, None], reach, 0.0), axis=0))
    from_state *= tl.exp2(reach) * scale
    q = tl.load(q_rows + columns[None, :], mask=mask_queries, other=0.0).to(tl.float32)
    if rate_ptr is not None:
        place = drate_ptr + ((pid % BLOCKS_K).to(tl.int64) * rows + tokens) * HV + head
        tl.store(place, drate + tl.sum(q * from_state, axis=1), mask=valid)
        from_state *= rate
    if dq_ptr is None:
        dk += from_state
    else:
        if rate_ptr is not None:
            dq *= rate
        query_place = dq_ptr + (query_rows * HV + head)[:, None] * K + columns[None, :]
        tl.store(query_place, (dq + from_state).to(dtype), mask=mask_queries)
    dgate = spread(spread_ptr, LEVELS + 1, q * from_state, dgate, CHUNK, PRECISION)

    offsets = scalars * K + steps[:, None] * (HV * K) + columns[None, :]
    gate_place = dgate_ptr + ((tokens // STEPS) * HV + head)[:, None] * K + columns[None, :]
    mask_gate = mask & (tokens % STEPS == 0)[:, None]
    if ERASES:
        dk += tl.load(dk_ptr + offsets, mask=mask, other=0.0)
        dgate += tl.load(gate_place, mask=mask_gate, other=0.0)
    else:
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
    tl.store(gate_place, dgate, mask=mask_gate)


class ChannelGradients(NamedTuple):
    """Gradients a head with a state.

    Attributes:
        q: [B, T, HV, K].
        k: [B, R, HV, K].
        gate: [B, T, HV, K] float32.
    """

    q: Tensor
    k: Tensor
    gate: Tensor


class ErasureGradients(NamedTuple):
    """Gradients of erasures, one a head with a state.

    Attributes:
        a: [B, R, HV, K], or None where a is b.
        v: dv, [B, R, HV, V]; dR itself where there is no weight.
        rate: [blocks of K, B R, HV] float32, or None.
        weight: [B, R, HV] in the dtype of w, or None.
    """

    a: Tensor | None
    v: Tensor
    rate: Tensor | None
    weight: Tensor | None


def channel_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    grad: Tensor,
    states: Tensor,
    grad_states: Tensor,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    num_steps: int = 1,
) -> ChannelGradients:
    """Gradients of every query, key and gate; rows of no document get zeros.

    Args:
        v: U where there are erasures.
        chunks: in rows, of which a token has ``num_steps``: the first decays, the last has the query.
    """
    heads, key_dim = v.shape[2], q.shape[-1]
    made = ChannelGradients(
        chunks.rows_like(q, *q.shape[:2], heads, key_dim),
        chunks.rows_like(k, *k.shape[:2], heads, key_dim),
        chunks.rows_like(log_decay, dtype=torch.float32),
    )
    _launch(
        *(q, k, v, None, log_decay, grad, states, grad_states),
        (made.q, made.k, None, made.gate),
        (None, None, None, None),
        chunks,
        scale=scale,
        tiles=tiles,
        num_steps=num_steps,
        query_steps=num_steps,
    )
    return made


def erasure_gradients(
    operands: ScanOperands,
    corrected: Tensor,
    residual: Tensor,
    states: Tensor,
    of_queries: ChannelGradients,
    chunks: Spans,
    *,
    tiles: Tiles,
) -> ErasureGradients:
    """Gradients of every erasure; rows of no document get zeros.

    Args:
        corrected, residual: U and dR, [B, R, HV, V].
        of_queries: their gradients; the shares of keys and gates are added to them.
    """
    _, a, b, v, rate, weight, log_decay, *_ = operands
    assert log_decay is not None
    (batch, rows, heads, _), key_dim = residual.shape, b.shape[-1]
    made = ErasureGradients(
        None if a is None else chunks.rows_like(b, batch, rows, heads, key_dim),
        residual if weight is None else chunks.rows_like(residual),
        None
        if rate is None
        else chunks.rows_like(b, ceil_div(key_dim, tiles.block), batch * rows, heads, dtype=torch.float32),
        None if weight is None else chunks.rows_like(weight),
    )
    _launch(
        *(b if a is None else a, b, corrected, rate, log_decay, residual, states, None),
        (made.a, of_queries.k, made.rate, of_queries.gate),
        (None, None, None, None) if weight is None else (v, weight, made.v, made.weight),
        chunks,
        scale=-1.0,
        tiles=tiles,
        num_steps=operands.num_steps,
        reads_before=operands.reads_before_decay,
    )
    return made


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor | None,
    log_decay: Tensor,
    grad: Tensor,
    states: Tensor,
    grad_states: Tensor | None,
    made: tuple[Tensor | None, ...],
    by_value: tuple[Tensor | None, ...],
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    num_steps: int,
    query_steps: int = 1,
    reads_before: bool = False,
) -> None:
    """Both kernels, of queries or, without ``grad_states``, of erasures."""
    heads, value_dim, key_dim, size = v.shape[2], v.shape[3], q.shape[-1], chunks.length
    levels, value = size.bit_length() - 1, by_value[0]
    pairs = q.new_empty(chunks.count, heads, levels + 1, size, size)
    sizes = {
        "HG": grad.shape[2],
        "HV": heads,
        "V": value_dim,
        "CHUNK": size,
        "BLOCK_V": min(2 * tiles.block, max(tiles.block, power_of_2_from(value_dim))),
        "LEVELS": levels,
        "QUERY_STEPS": query_steps,
        "ERASES": grad_states is None,
        "PRECISION": products_in(q.dtype, device_family(q.device)),
    }
    place = (chunks.table, scale, chunks.seq_len, chunks.per_sequence)
    launch(
        _level_pairs_kernel,
        (chunks.count * heads,),
        (v, grad, *by_value, pairs, *place),
        {**sizes, "HO": heads if value is None else value.shape[2]},
        num_warps=4,
        num_stages=1,
    )
    launch(
        _channel_gradients_kernel,
        (chunks.count * heads * ceil_div(key_dim, tiles.block),),
        (
            *(q, k, v, grad, rate, log_decay, pairs, states, grad_states),
            sum_tables(size, q, reads_before=reads_before),
            spread_tables(size, q, reads_before=reads_before),
            *made,
            *place,
            k.shape[0] * k.shape[1],
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
