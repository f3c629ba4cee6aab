"""Outputs of the delta family for all chunks at once, from the state that a scan has left at the start of each.

    R = w v - (beta a from_start) S^T        U = L^-1 R
    o = sum over blocks of  scale (q from_start) S^T + (A_qk L^-1) R

as in ``delta_scan``, which makes o and U itself where a head has one block. Blocks of one head have states and keys of
their own and share a value: here their read-outs add up in registers, and neither v nor o has a copy for each. For
heads of one block scan and outputs together take longer than a scan that makes both (on an H200 at B8 T2048 H16
K128 V128 0.27 against 0.19 ms, and 0.30 against 0.28 in training).

Work split: one program a (block of V, chunk, head of values), which goes over the blocks of the head. Bytes a
micro-step and block, 16-bit, K = V = 128, C = 64: reads q, a, S and A_qk L^-1 (1152), and v (256) from a cache after
the first block; in training reads L^-1 (128) and writes U (256); writes o (256) once a head. Floor: the same. q, a,
A_qk L^-1 and L^-1 are read once a block of V, from the second-level cache after the first.
Shapes: B T HO HV K V, n micro-steps a token, C chunk.
Oracle: ``chunk.py``. Source: arXiv:2406.06484 section 3.2, and section 6 for blocks.
"""

import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles
from statemix.kernels.spans import Spans, ceil_div
from statemix.kernels.triton.primitives.gates import DIAGONAL
from statemix.kernels.triton.primitives.loads import load_sub_step, load_tile, locate_chunk, low_part

from .delta_scan import DeltaScanInputs
from .delta_scan_kernel import load_from_start, read_out, residuals


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "micro_steps"])
def _delta_outputs_kernel(
    query_ptr,  # q, [tokens, HQ, K]; scale q from_start, [micro_steps, HV, K], under a diagonal decay; or None
    erase_ptr,  # a, [micro_steps, HA, K]; beta a from_start, [micro_steps, HV, K], under a diagonal decay
    value_ptr,  # [micro_steps, HO, V]
    scores_ptr,  # A_qk L^-1, [chunks, HV, C, C]; None without output
    erase_beta_ptr,  # [micro_steps, HV], or None for 1
    write_ptr,  # [micro_steps, HV], or None for 1
    gate_ptr,  # scalar decay: [2, HV, micro_steps] of cumulative_gate; else not read
    states_ptr,  # S, [chunks, HV, K, V]
    output_ptr,  # o, [tokens, HO, V], or None
    L_inv_ptr,  # L^-1, [chunks, HV, C, C]; None without U
    u_ptr,  # U, [micro_steps, HV, V], or None
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    micro_steps,
    HQ: tl.constexpr,
    HA: tl.constexpr,
    HO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SUB_STEPS: tl.constexpr,
    DECAY: tl.constexpr,
    READS_BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """29 parameters: nine inputs, two outputs and their sizes: R is made once for o and U."""
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
    QUERY_SUB_STEPS: tl.constexpr = 1 if DECAY == DIAGONAL else SUB_STEPS
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
        head_erase_beta_ptr, head_write_ptr = erase_beta_ptr, write_ptr
        if erase_beta_ptr is not None:
            head_erase_beta_ptr += head
        if write_ptr is not None:
            head_write_ptr += head
        from_start, erase_decay, _ = load_from_start(
            gate_ptr, head_erase_beta_ptr, start, head, steps, valid, count, micro_steps, HV, DECAY, READS_BEFORE
        )
        place = erase_ptr + (start * HA + head // (HV // HA)) * K
        erase = load_tile(place, steps, valid, k_columns, HA * K, K, BLOCK_K)
        R = residuals(
            erase,
            state,
            erase_decay,
            value_ptr,
            head_write_ptr,
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
        high = R.to(dtype)
        low = high
        if dtype != tl.float32:
            low = low_part(R, high)
        if output_ptr is not None:
            place = query_ptr + head // (HV // HQ) * K
            query = load_sub_step(
                place, start, steps, valid, k_columns, HQ * K, K, BLOCK_K, QUERY_SUB_STEPS, QUERY_SUB_STEPS - 1
            )
            place = scores_ptr + chunk_head * CHUNK * CHUNK + square
            output += read_out(query, state, from_start * scale, place, high, low, DECAY, PRECISION)
        if u_ptr is not None:
            L_inv = tl.load(L_inv_ptr + chunk_head * CHUNK * CHUNK + square)
            u = tl.dot(L_inv, high, input_precision=PRECISION)
            place = u_ptr + ((start + steps) * HV + head)[:, None] * V + v_columns[None, :]
            tl.store(place, u.to(dtype), mask=mask)
    if output_ptr is not None:
        micro_step = start + steps
        if SUB_STEPS > 1:
            mask = mask & (micro_step % SUB_STEPS == SUB_STEPS - 1)[:, None]
        place = output_ptr + ((micro_step // SUB_STEPS) * HO + value_head)[:, None] * V + v_columns[None, :]
        tl.store(place, output.to(dtype), mask=mask)


def delta_outputs(
    inputs: DeltaScanInputs,
    states: Tensor,
    chunks: Spans,
    *,
    tiles: Tiles,
    output: Tensor | None,
    pseudo_values: tuple[Tensor | None, Tensor] | None,
) -> None:
    """Fill ``output`` and U; micro-steps of no document are left out.

    Args:
        inputs: of the forward scan.
        states: [chunks, HV, K, V] that it left.
        chunks: in micro-steps.
        pseudo_values: L^-1, and where U goes, as of ``inter_chunk_scan``.
    """
    query, erase, _, value, scores, erase_beta, write, gate, *_ = inputs
    L_inv, u = (None, None) if pseudo_values is None else pseudo_values
    reads = (None, None) if output is None else (query, scores)
    launch(
        _delta_outputs_kernel,
        (chunks.count * value.shape[2] * ceil_div(value.shape[3], tiles.block),),
        (
            *(reads[0], erase, value, reads[1], erase_beta, write, gate, states, output, L_inv, u),
            *(*chunks.place(inputs.scale), erase.shape[0] * erase.shape[1]),
        ),
        inputs.constants(tiles),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
