"""Outputs of the delta family for all chunks at once, from the state that a walk has left at the start of each.

    R = w v - (r a reach) S^T      o = sum over blocks of  scale (q reach) S^T + Q R      U = T R

as in ``delta_scan``, which makes o and U itself where a head has one block. Blocks of one head have states and
keys of their own and share a value: here their read-outs add up in registers, and neither v nor o has a copy for each.
For heads of one block walk and outputs together take longer than a walk that makes both (on an H200 at B8 T2048 H16
K128 V128 0.27 against 0.19 ms, and 0.30 against 0.28 in training).

Work split: one program a (block of V, chunk, head of values), which goes over the blocks of the head. Bytes a row and
block, 16-bit, K = V = 128, C = 64: reads q, a, S and Q (1152), and v (256) from a cache after the first block; in
training reads T (128) and writes U (256); writes o (256) once a head. Floor: the same. q, a, Q and T are read once a
block of V, from the second-level cache after the first.
Shapes: B T HO HV K V, n micro-steps a token, R = T n rows, C chunk.
Oracle: ``chunk.py``. Source: arXiv:2406.06484 section 3.2, and section 6 for blocks.
"""

import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles
from statemix.kernels.spans import Spans, ceil_div
from statemix.kernels.triton.primitives.gates import DIAGONAL
from statemix.kernels.triton.primitives.loads import load_rows, load_step, locate_chunk, low_part

from .delta_scan import DeltaWalkInputs
from .delta_scan_kernel import load_reach, read_out, residual_rows


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "rows"])
def _delta_outputs_kernel(
    query_ptr,  # q, [tokens, HQ, K]; q reach scale, [rows, HV, K], under a diagonal decay; None without output
    eraser_ptr,  # a, [rows, HA, K]; r a reach, [rows, HV, K], under a diagonal decay
    value_ptr,  # [rows, HO, V]
    pairs_ptr,  # Q, [chunks, HV, C, C]; None without output
    rate_ptr,  # [rows, HV], or None for 1
    weight_ptr,  # [rows, HV], or None for 1
    gate_ptr,  # scalar decay: [2, HV, rows] of cumulative_gate; else not read
    states_ptr,  # S, [chunks, HV, K, V]
    output_ptr,  # o, [tokens, HO, V], or None
    inverse_ptr,  # T, [chunks, HV, C, C]; None without U
    corrected_ptr,  # U, [rows, HV, V], or None
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
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
    PRECISION: tl.constexpr,
):
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    value_head = ((pid // BLOCKS_V) % HO).to(tl.int64)
    start, end, chunk = locate_chunk(pid // (BLOCKS_V * HO), chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    count = (end - start).to(tl.int32)
    valid = steps < count
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    QUERY_STEPS: tl.constexpr = 1 if DECAY == DIAGONAL else STEPS
    k_columns = tl.arange(0, BLOCK_K)
    v_columns = (pid % BLOCKS_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_state = (k_columns < K)[:, None] & (v_columns < V)[None, :]
    mask = valid[:, None] & (v_columns < V)[None, :]
    square = steps[:, None] * CHUNK + steps[None, :]
    value_ptr += value_head * V

    output = tl.zeros([CHUNK, BLOCK_V], dtype=tl.float32)
    for block in tl.range(HV // HO, num_stages=1):
        head = value_head * (HV // HO) + block
        chunk_head = chunk * HV + head
        place = states_ptr + chunk_head * K * V + k_columns[:, None] * V + v_columns[None, :]
        state = tl.load(place, mask=mask_state, other=0.0)
        head_rate_ptr, head_weight_ptr = rate_ptr, weight_ptr
        if rate_ptr is not None:
            head_rate_ptr += head
        if weight_ptr is not None:
            head_weight_ptr += head
        reach, read_reach, _ = load_reach(
            gate_ptr, head_rate_ptr, start, head, steps, valid, count, rows, HV, DECAY, READS_BEFORE
        )
        place = eraser_ptr + (start * HA + head // (HV // HA)) * K
        eraser = load_rows(place, steps, valid, k_columns, HA * K, K, BLOCK_K)
        residual = residual_rows(
            eraser,
            state,
            read_reach,
            value_ptr,
            head_weight_ptr,
            start,
            steps,
            valid,
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
            place = query_ptr + head // (HV // HQ) * K
            query = load_step(place, start, steps, valid, k_columns, HQ * K, K, BLOCK_K, QUERY_STEPS, QUERY_STEPS - 1)
            place = pairs_ptr + chunk_head * CHUNK * CHUNK + square
            output += read_out(query, state, reach * scale, place, high, low, DECAY, PRECISION)
        if corrected_ptr is not None:
            inverse = tl.load(inverse_ptr + chunk_head * CHUNK * CHUNK + square)
            corrected = tl.dot(inverse, high, input_precision=PRECISION)
            place = corrected_ptr + ((start + steps) * HV + head)[:, None] * V + v_columns[None, :]
            tl.store(place, corrected.to(dtype), mask=mask)
    if output_ptr is not None:
        row = start + steps
        if STEPS > 1:
            mask = mask & (row % STEPS == STEPS - 1)[:, None]
        place = output_ptr + ((row // STEPS) * HO + value_head)[:, None] * V + v_columns[None, :]
        tl.store(place, output.to(dtype), mask=mask)


def delta_outputs(
    inputs: DeltaWalkInputs,
    states: Tensor,
    chunks: Spans,
    *,
    tiles: Tiles,
    output: Tensor | None,
    corrected: tuple[Tensor | None, Tensor] | None,
) -> None:
    """Fill ``output`` and U; rows of no document are left out.

    Args:
        inputs: of the forward walk.
        states: [chunks, HV, K, V] that it left.
        chunks: in rows.
        corrected: T, and where U goes, as of ``delta_walk``.
    """
    value_heads, value_dim = inputs.value.shape[2:]
    inverse, corrected_rows = corrected if corrected is not None else (None, None)
    launch(
        _delta_outputs_kernel,
        (chunks.count * value_heads * ceil_div(value_dim, tiles.block),),
        (
            None if output is None else inputs.query,
            inputs.eraser,
            inputs.value,
            None if output is None else inputs.pairs,
            *(inputs.rate, inputs.weight, inputs.gate, states, output, inverse, corrected_rows),
            chunks.table,
            inputs.scale,
            chunks.seq_len,
            chunks.per_sequence,
            inputs.eraser.shape[0] * inputs.eraser.shape[1],
        ),
        inputs.constants(tiles),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
