"""The walk of the delta family: that of ``walk_triton`` with every value corrected by what the state holds already.

Forward, for the rows of one chunk and the state S at its start; Q, W and T are those of ``inverse_triton``:

    R = w v - (r a reach) S^T      o = scale (q reach) S^T + Q R      S <- S total + R^T W      U = T R

Reverse, last chunk first, dS at the chunk's end:

    dR = Q^T dO + W dS^T           dS <- dS total + scale dO^T (q reach) - dR^T (r a reach)

U is stored for the gradients only: nothing in the walk waits for it. Where a head has several blocks the walk makes
states only, and ``delta_outputs_triton`` the rest. R, and dR where it meets a, are two 16-bit parts: with beta = 2 and
a key that repeats, its terms in S cancel, and one part would lose the value beside them (0.08 of the output after 2048
tokens).

A segment's map S -> S P + H, where sequences are too few to fill the device: H is the walk from zero, P the walk from
the identity without values, both side by side in one launch: columns of P are blocks after those of V, which start from
those of the identity. ``join_maps`` chains them; the reverse walk chains P^T. (P is K x K here; the pairs of rows are
inside Q.)

Work split: one program a (block of V, head, span); the state is a float32 tile [K, BLOCK_V] in registers, transposed as
in ``walk_triton``. Bytes a row and head, 16-bit, K = V = 128, C = 64: reads q, a, W, v and Q (1152), writes o (256); in
training reads T (128), writes U (256) and states (512); with states only it reads a, W and v (768) and writes those.
Floor: q, a, W, v, Q and o. q, a, W and Q are read once a block of V, from the second-level cache after the first. The
reverse walk reads q, a, W, dO and Q (1152), writes dR and dS (768). A segment adds the walks that make H and P, and
4 (K V + K K) bytes written and read for the join.
Shapes: B T HO HV K V, n micro-steps a token, R = T n rows, C chunk.
Oracle: ``chunk.py``. Source: arXiv:2406.06484 section 3, arXiv:2412.06464 section 3.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .launch_config import Tiles, device_family, products_in
from .spans import Spans, ceil_div, power_of_2_from
from .tile_triton import DIAGONAL, SCALAR, load_gate_before, load_rows, load_scalars, load_step, locate, low_part


@triton.jit
def load_reach(
    gate_ptr,  # as of the walk
    rate_ptr,  # [rows, HV] at the head, or None for 1
    first,
    head,
    steps,
    valid,
    count,
    rows,
    HV: tl.constexpr,
    DECAY: tl.constexpr,
    READS_BEFORE: tl.constexpr,
):
    """reach, r reach of erasures, and the decay across the chunk: all 1 where a diagonal decay has been applied."""
    total, reach, read_reach = 1.0, tl.full(steps.shape, 1.0, tl.float32), tl.full(steps.shape, 1.0, tl.float32)
    if DECAY == SCALAR:
        high_ptr = gate_ptr + head * rows + first
        reach = tl.exp2(tl.load(high_ptr + tl.minimum(steps, count - 1)))
        total = tl.exp2(tl.load(high_ptr + count - 1))
        read_reach = reach
        if READS_BEFORE:
            before, _ = load_gate_before(gate_ptr, first, head, steps, count, rows, HV)
            read_reach = tl.exp2(before)
    if DECAY != DIAGONAL:
        if rate_ptr is not None:
            read_reach *= load_scalars(rate_ptr + first * HV, steps, valid, HV)
    return reach, read_reach, total


@triton.jit
def residual_rows(
    eraser,
    state,
    read_reach,
    value_ptr,
    weight_ptr,
    first,
    steps,
    has_value,
    columns,
    HO: tl.constexpr,
    HV: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """R = w v - (r a reach) S^T of the rows ``first + steps``."""
    residual = tl.dot(eraser, state, input_precision=PRECISION)
    if DECAY != DIAGONAL:
        residual *= read_reach[:, None]
    value = load_rows(value_ptr + first * HO * V, steps, has_value, columns, HO * V, V, BLOCK_V).to(tl.float32)
    if weight_ptr is not None:
        value *= load_scalars(weight_ptr + first * HV, steps, has_value, HV)[:, None]
    return value - residual


@triton.jit
def read_out(query, state, reach, pairs_ptr, high, low, DECAY: tl.constexpr, PRECISION: tl.constexpr):
    """o = (q reach) S^T + Q R; ``reach`` has the scale in it, ``pairs_ptr`` is where Q lies, high + low is R.

    Q is loaded after the first product: before it, it would be in shared memory beside the state.
    """
    output = tl.dot(query, state, input_precision=PRECISION)
    if DECAY != DIAGONAL:
        output *= reach[:, None]
    pairs = tl.load(pairs_ptr)
    output = tl.dot(pairs, high, output, input_precision=PRECISION)
    if high.dtype != tl.float32:
        output = tl.dot(pairs, low, output)
    return output


@triton.jit(do_not_specialize=["T", "spans_per_seq", "chunks_per_seq", "span", "rows"])
def _delta_walk_kernel(
    query_ptr,  # q, [tokens, HQ, K]; q reach scale, [rows, HV, K], under a diagonal decay; None without output
    eraser_ptr,  # a, [rows, HA, K]; r a reach, [rows, HV, K], under a diagonal decay
    key_ptr,  # W, [rows, HV, K]
    value_ptr,  # v, [rows, HO, V]; dO, [tokens, HO, V]
    pairs_ptr,  # Q, [chunks, HV, C, C]; None without output
    rate_ptr,  # [rows, HV], or None for 1
    weight_ptr,  # [rows, HV], or None for 1; forward only
    gate_ptr,  # None | [2, HV, rows] of cumulative_gate | [chunks, HV, K] total decay
    initial_ptr,  # [spans, HV, V, K] float32, or None
    output_ptr,  # o, [tokens, HV, V]; dR, [rows, HV, V]; None for states only
    inverse_ptr,  # T, [chunks, HV, C, C], or None
    corrected_ptr,  # U, [rows, HV, V], or None
    states_ptr,  # [chunks, HV, K, V]: the state each chunk starts from, or None
    final_ptr,  # [spans, HV, V, K] float32, or None
    maps_ptr,  # P of every span, [spans, HV, K, K] float32, or None
    spans_ptr,  # [spans, 4], or None for a batch
    scale,
    T,
    spans_per_seq,
    chunks_per_seq,
    span,
    rows,
    HQ: tl.constexpr,
    HA: tl.constexpr,
    HO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STEPS: tl.constexpr,
    DECAY: tl.constexpr,
    READS_BEFORE: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BLOCKS: tl.constexpr = BLOCKS_V if maps_ptr is None else BLOCKS_V + (K + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = ((pid // BLOCKS) % HV).to(tl.int64)
    index = pid // (BLOCKS * HV)
    start, end, first_chunk = locate(
        index, spans_ptr, T, spans_per_seq, chunks_per_seq, span, CHUNK, spans_ptr is not None
    )
    num_chunks = ((end - start + CHUNK - 1) // CHUNK).to(tl.int32)
    dtype: tl.constexpr = key_ptr.dtype.element_ty
    QUERY_STEPS: tl.constexpr = 1 if DECAY == DIAGONAL else STEPS
    k_columns = tl.arange(0, BLOCK_K)
    v_columns = (pid % BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k, mask_v = k_columns < K, v_columns < V  # no column of V in a block of P
    map_columns = v_columns - BLOCKS_V * BLOCK_V
    mask_state = mask_k[:, None] & mask_v[None, :]
    steps = tl.arange(0, CHUNK)

    eraser_ptr += head // (HV // HA) * K
    key_ptr += head * K
    value_ptr += head // (HV // HO) * V
    if query_ptr is not None:
        query_ptr += head // (HV // HQ) * K
    if output_ptr is not None:
        output_ptr += head * V
    if rate_ptr is not None:
        rate_ptr += head
    if weight_ptr is not None:
        weight_ptr += head
    state_offset = (index.to(tl.int64) * HV + head) * K * V + v_columns[None, :] * K + k_columns[:, None]
    if initial_ptr is not None:
        state = tl.load(initial_ptr + state_offset, mask=mask_state, other=0.0)
    elif maps_ptr is not None:
        state = tl.where(k_columns[:, None] == map_columns[None, :], 1.0, 0.0)
    else:
        state = tl.zeros([BLOCK_K, BLOCK_V], dtype=tl.float32)

    for i in tl.range(0, num_chunks, num_stages=STAGES):
        if REVERSE:
            chunk = num_chunks - 1 - i
        else:
            chunk = i
        first = start + chunk * CHUNK
        count = tl.minimum(end - first, CHUNK).to(tl.int32)
        valid = steps < count
        chunk_head = (first_chunk + chunk) * HV + head
        eraser = load_rows(eraser_ptr + first * HA * K, steps, valid, k_columns, HA * K, K, BLOCK_K)
        key = load_rows(key_ptr + first * HV * K, steps, valid, k_columns, HV * K, K, BLOCK_K)
        reach, read_reach, total = load_reach(
            gate_ptr, rate_ptr, first, head, steps, valid, count, rows, HV, DECAY, READS_BEFORE
        )
        if DECAY == DIAGONAL:
            total = tl.load(gate_ptr + chunk_head * K + k_columns, mask=mask_k, other=0.0)[:, None]
        reach *= scale
        if states_ptr is not None:
            place = states_ptr + chunk_head * K * V + k_columns[:, None] * V + v_columns[None, :]
            tl.store(place, state.to(dtype), mask=mask_state)
        mask_rows = valid[:, None] & mask_v[None, :]

        if REVERSE:
            value = load_step(value_ptr, first, steps, valid, v_columns, HO * V, V, BLOCK_V, STEPS, STEPS - 1)
            residual = tl.dot(key, state.to(dtype), input_precision=PRECISION)
            pairs = tl.load(pairs_ptr + chunk_head * CHUNK * CHUNK + steps[None, :] * CHUNK + steps[:, None])
            residual = tl.dot(pairs, value, residual, input_precision=PRECISION)
            if output_ptr is not None:
                place = output_ptr + (first + steps)[:, None] * (HV * V) + v_columns[None, :]
                tl.store(place, residual.to(dtype), mask=mask_rows)
            query = load_step(
                query_ptr, first, steps, valid, k_columns, HQ * K, K, BLOCK_K, QUERY_STEPS, QUERY_STEPS - 1
            )
            state *= total
            if DECAY != DIAGONAL:
                value = (value * reach[:, None]).to(dtype)
                residual *= read_reach[:, None]
            state = tl.dot(tl.trans(query), value, state, input_precision=PRECISION)
            residual = 0.0 - residual
            high = residual.to(dtype)
            state = tl.dot(tl.trans(eraser), high, state, input_precision=PRECISION)
            if dtype != tl.float32:
                low = low_part(residual, high)
                state = tl.dot(tl.trans(eraser), low, state)
        else:
            has_value = valid
            if maps_ptr is not None:
                has_value = valid & (pid % BLOCKS < BLOCKS_V)
            residual = residual_rows(
                eraser,
                state.to(dtype),
                read_reach,
                value_ptr,
                weight_ptr,
                first,
                steps,
                has_value,
                v_columns,
                HO,
                HV,
                V,
                BLOCK_V,
                DECAY,
                PRECISION,
            )
            high = residual.to(dtype)
            low = high
            if dtype != tl.float32:
                low = low_part(residual, high)
            if output_ptr is not None:
                query = load_step(
                    query_ptr, first, steps, valid, k_columns, HQ * K, K, BLOCK_K, QUERY_STEPS, QUERY_STEPS - 1
                )
                place = pairs_ptr + chunk_head * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
                output = read_out(query, state.to(dtype), reach, place, high, low, DECAY, PRECISION)
                row = first + steps
                mask = mask_rows
                if STEPS > 1:
                    mask = mask & (row % STEPS == STEPS - 1)[:, None]
                tl.store(
                    output_ptr + (row // STEPS)[:, None] * (HV * V) + v_columns[None, :], output.to(dtype), mask=mask
                )
            if corrected_ptr is not None:
                inverse = tl.load(inverse_ptr + chunk_head * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :])
                corrected = tl.dot(inverse, high, input_precision=PRECISION)
                place = corrected_ptr + head * V + (first + steps)[:, None] * (HV * V) + v_columns[None, :]
                tl.store(place, corrected.to(dtype), mask=mask_rows)
            state *= total
            state = tl.dot(tl.trans(key), high, state, input_precision=PRECISION)
            if dtype != tl.float32:
                state = tl.dot(tl.trans(key), low, state)

    if final_ptr is not None:
        tl.store(final_ptr + state_offset, state, mask=mask_state)
    if maps_ptr is not None:
        place = maps_ptr + (index.to(tl.int64) * HV + head) * K * K + map_columns[None, :] * K + k_columns[:, None]
        is_inside = (map_columns >= 0) & (map_columns < K)
        tl.store(place, state, mask=mask_k[:, None] & is_inside[None, :])


@triton.jit(do_not_specialize=["spans_per_seq"])
def _join_maps_kernel(
    initial_ptr,  # [N, HV, V, K] float32, or None
    updates_ptr,  # H, [spans, HV, V, K] float32, replaced by the state each segment starts from
    maps_ptr,  # P, [spans, HV, K, K] float32
    final_ptr,  # [N, HV, V, K] float32
    offsets_ptr,  # [N + 1] segments before each document, or None for a batch
    spans_per_seq,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """S[s + 1] = S[s] P[s] + H[s] over the segments of one sequence; in reverse dS[s - 1] = dS[s] P[s]^T + H[s]."""
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = ((pid // BLOCKS_V) % HV).to(tl.int64)
    sequence = (pid // (BLOCKS_V * HV)).to(tl.int64)
    if offsets_ptr is not None:
        first, last = tl.load(offsets_ptr + sequence).to(tl.int64), tl.load(offsets_ptr + sequence + 1).to(tl.int64)
    else:
        first, last = sequence * spans_per_seq, (sequence + 1) * spans_per_seq
    values = (pid % BLOCKS_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    columns = tl.arange(0, BLOCK_K)
    mask = (values < V)[:, None] & (columns < K)[None, :]
    offset = values[:, None] * K + columns[None, :]
    if initial_ptr is not None:
        state = tl.load(initial_ptr + (sequence * HV + head) * K * V + offset, mask=mask, other=0.0)
    else:
        state = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    for i in range((last - first).to(tl.int32)):
        segment = first + i
        if REVERSE:
            segment = last - 1 - i
        update_ptr = updates_ptr + (segment * HV + head) * K * V
        map_ptr = maps_ptr + (segment * HV + head) * K * K
        update = tl.load(update_ptr + offset, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(update_ptr + offset, state, mask=mask)
        tl.debug_barrier()  # the product reads the state back by columns
        for block in range((K + BLOCK - 1) // BLOCK):
            inner = block * BLOCK + tl.arange(0, BLOCK)
            part_ptr = update_ptr + values[:, None] * K + inner[None, :]
            part = tl.load(part_ptr, mask=(values < V)[:, None] & (inner < K)[None, :], other=0.0)
            if REVERSE:
                place = map_ptr + columns[None, :] * K + inner[:, None]
            else:
                place = map_ptr + inner[:, None] * K + columns[None, :]
            matrix = tl.load(place, mask=(inner < K)[:, None] & (columns < K)[None, :], other=0.0)
            update = tl.dot(part, matrix, update, input_precision=PRECISION)
        state = update
    tl.store(final_ptr + (sequence * HV + head) * K * V + offset, state, mask=mask)


class DeltaWalkInputs(NamedTuple):
    """What the walk reads; names and shapes as in ``_delta_walk_kernel``.

    Attributes:
        decay, reads_before_decay, num_steps, scale: of the call.
    """

    query: Tensor
    eraser: Tensor
    key: Tensor
    value: Tensor
    pairs: Tensor
    rate: Tensor | None
    weight: Tensor | None
    gate: Tensor | None
    initial: Tensor | None
    decay: int
    reads_before_decay: bool
    num_steps: int
    scale: float

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """The compile-time parameters that the walk and the outputs made from its states share."""
        return {
            "HQ": self.query.shape[2],
            "HA": self.eraser.shape[2],
            "HO": self.value.shape[2],
            "HV": self.key.shape[2],
            "K": self.key.shape[-1],
            "V": self.value.shape[-1],
            "CHUNK": self.pairs.shape[-1],
            "BLOCK_K": max(16, power_of_2_from(self.key.shape[-1])),
            "BLOCK_V": tiles.block,
            "STEPS": self.num_steps,
            "DECAY": self.decay,
            "READS_BEFORE": self.reads_before_decay and self.decay == SCALAR.value,
            "PRECISION": products_in(self.key.dtype, device_family(self.key.device)),
        }


def delta_walk(
    inputs: DeltaWalkInputs,
    spans: Spans,
    *,
    tiles: Tiles,
    final: Tensor | None,
    maps: Tensor | None = None,
    output: Tensor | None = None,
    states: Tensor | None = None,
    corrected: tuple[Tensor | None, Tensor] | None = None,
    reverse: bool = False,
) -> None:
    """Fill ``output`` (dR in reverse), ``states`` (each chunk starts from; in reverse those at its end) and ``final``.

    Args:
        maps: where P of every span goes; forward only, and from no initial state.
        corrected: T, and where U goes.
    """
    value_dim, chunk_size = inputs.value.shape[-1], inputs.pairs.shape[-1]
    heads, key_dim = inputs.key.shape[2:]
    has_output = output is not None
    inverse, corrected_rows = corrected if corrected is not None else (None, None)
    assert reverse or output is None or heads == inputs.value.shape[2], "outputs of blocks are added up elsewhere"
    blocks = ceil_div(value_dim, tiles.block) + (0 if maps is None else ceil_div(key_dim, tiles.block))
    launch(
        _delta_walk_kernel,
        (spans.count * heads * blocks,),
        (
            inputs.query if has_output or reverse else None,
            inputs.eraser,
            inputs.key,
            inputs.value,
            inputs.pairs if has_output or reverse else None,
            inputs.rate,
            inputs.weight,
            inputs.gate,
            inputs.initial,
            output,
            inverse,
            corrected_rows,
            states,
            final,
            maps,
            spans.table,
            inputs.scale,
            spans.seq_len,
            spans.per_sequence,
            ceil_div(spans.seq_len, chunk_size),
            spans.length,
            inputs.eraser.shape[0] * inputs.eraser.shape[1],
        ),
        {**inputs.constants(tiles), "REVERSE": reverse, "STAGES": tiles.num_stages},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def join_maps(
    initial: Tensor | None, updates: Tensor, maps: Tensor, final: Tensor, spans: Spans, *, reverse: bool
) -> None:
    """Turn the updates of segments into the states they start from, in place, and fill ``final``."""
    num_sequences, heads, value_dim, key_dim = final.shape
    block_v, family = 16, device_family(final.device)
    prefetches = key_dim <= 128 and family != "gfx942"  # wider maps, or 64 KB of shared memory, hold one load
    launch(
        _join_maps_kernel,
        (num_sequences * heads * ceil_div(value_dim, block_v),),
        (initial, updates, maps, final, spans.offsets, spans.per_sequence),
        {
            "HV": heads,
            "K": key_dim,
            "V": value_dim,
            "BLOCK_V": block_v,
            "BLOCK_K": max(16, power_of_2_from(key_dim)),
            "BLOCK": 32,
            "REVERSE": reverse,
            "PRECISION": products_in(final.dtype, family),
        },
        num_warps=8 if prefetches else 4,
        num_stages=3 if prefetches else 1,
    )
