"""Intra-chunk gradients, for all chunks at once: of the scores of two micro-steps, of values and of write weights.

    dA_qk = scale lower(dO U^T) Gamma    dA_kk = -strictly_lower(dR U^T) Gamma    dv = w dR    dw = v^T dR

    dg_t = sum over scores j < t <= i of  dA_qk_ij q_i^T b_j  +  beta_i dA_kk_ij a_i^T b_j

with Gamma of a scalar decay: a diagonal one comes in with q, a and b, and its dA_qk has no diagonal, which is stored by
itself. dA_qk and dA_kk are stored transposed, for the kernel that makes the other gradients: beside those their
products spill. A scalar gate gets exactly the scores that it lies between: the difference of two cumulative sums over
micro-steps would be the same number, and under strong decay nothing but rounding. A micro-step i that reads before its
own decay leaves its own gate out.

Work split: one program a (chunk, head). Bytes a micro-step and head, 16-bit, K = V = 128, C = 64: reads U, dO, dR (768;
v for dw, 256), writes dA_qk, dA_kk and dv (512), which is the floor; under a scalar decay also the gate (8), for whose
gradient q, a and b (768; 512 where a is b), and 4 written.
Shapes: B T HO HV K V, n micro-steps a token, C chunk.
Oracle: autograd through ``chunk.py``.
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
from statemix.kernels.triton.primitives.gates import SCALAR, between, load_gate, load_gate_before
from statemix.kernels.triton.primitives.loads import (
    load_scalars,
    load_sub_step,
    load_tile,
    locate_chunk,
    store_value_gradients,
)


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "micro_steps"])
def _score_gradients_kernel(
    q_ptr,  # [tokens, HQ, K]; read for the gate only, as are a and b
    a_ptr,  # [micro_steps, HA, K], or None for b
    b_ptr,  # [micro_steps, HB, K]
    v_ptr,  # [micro_steps, HO, V]
    u_ptr,  # U or v, [micro_steps, HV, V]
    grad_ptr,  # dO, [tokens, HO, V]
    dR_ptr,  # dR, [micro_steps, HV, V]; None without erase pairs
    erase_beta_ptr,  # [micro_steps, HV], or None for 1
    write_ptr,  # [micro_steps, HV], or None for 1: then dR is dv
    gate_ptr,  # scalar decay: [2, HV, micro_steps] of cumulative_gate; else None
    dA_qk_ptr,  # transposed, [chunks, HV, C, C]
    dA_kk_ptr,  # transposed, [chunks, HV, C, C]; None without erase pairs
    diagonal_ptr,  # diagonal decay: the diagonal, [micro_steps, HV] float32; else None, and dA_qk has it
    dv_ptr,  # [micro_steps, HV, V]; None for w = 1
    dwrite_ptr,  # [micro_steps, HV]; None for w = 1
    dgate_ptr,  # [tokens, HV] float32, or None
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    micro_steps,
    HQ: tl.constexpr,
    HA: tl.constexpr,
    HB: tl.constexpr,
    HO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB_STEPS: tl.constexpr,
    DECAY: tl.constexpr,
    READS_BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """34 parameters: ten inputs, six gradients and their sizes: one pass over U, dO and dR makes all of them."""
    pid = tl.program_id(0)
    head = (pid % HV).to(tl.int64)
    start, end, chunk = locate_chunk(pid // HV, chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    count = (end - start).to(tl.int32)
    valid = steps < count
    dtype: tl.constexpr = u_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    before, not_later = steps[:, None] < steps[None, :], steps[:, None] <= steps[None, :]  # rows j, columns i
    scalars = start * HV + head
    grad_ptr += head // (HV // HO) * V
    u_ptr += scalars * V
    if dR_ptr is not None:
        dR_ptr += scalars * V
    dA_qk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    dA_kk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    if write_ptr is not None:
        write = load_scalars(write_ptr + scalars, steps, valid, HV)
        dwrite = tl.zeros([CHUNK], dtype=tl.float32)
    for block in tl.static_range((V + BLOCK - 1) // BLOCK):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        u = load_tile(u_ptr, steps, valid, columns, HV * V, V, BLOCK)
        grad = load_sub_step(grad_ptr, start, steps, valid, columns, HO * V, V, BLOCK, SUB_STEPS, SUB_STEPS - 1)
        if dR_ptr is not None:  # loaded before the first product: after it, registers spill
            dR = load_tile(dR_ptr, steps, valid, columns, HV * V, V, BLOCK)
        dA_qk = tl.dot(u, tl.trans(grad), dA_qk, input_precision=PRECISION)
        if dR_ptr is not None:
            dA_kk = tl.dot(u, tl.trans(dR), dA_kk, input_precision=PRECISION)
        if write_ptr is not None:
            dwrite += store_value_gradients(dR, v_ptr, dv_ptr, write, start, head, steps, valid, columns, HO, HV, V)
    if write_ptr is not None:
        place = dwrite_ptr + scalars + steps * HV
        tl.store(place, dwrite.to(dwrite_ptr.dtype.element_ty), mask=valid)
    dA_qk *= scale
    if diagonal_ptr is not None:
        diagonal = tl.sum(tl.where(steps[:, None] == steps[None, :], dA_qk, 0.0), axis=1)
        tl.store(diagonal_ptr + scalars + steps * HV, diagonal, mask=valid)
        dA_qk = tl.where(before, dA_qk, 0.0)
    else:
        dA_qk = tl.where(not_later, dA_qk, 0.0)
    dA_kk = tl.where(before, -dA_kk, 0.0)
    if DECAY == SCALAR:
        high, low, _, _ = load_gate(gate_ptr, start, head, steps, count, micro_steps, HV)
        factor = tl.exp2(tl.where(before, -between(high, low, high, low, EXACT), 0.0))
        dA_qk *= factor
        if READS_BEFORE:
            read, read_low = load_gate_before(gate_ptr, start, head, steps, count, micro_steps, HV)
            factor = tl.exp2(tl.where(before, -between(high, low, read, read_low, EXACT), 0.0))
        dA_kk *= factor
    place = (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    tl.store(dA_qk_ptr + place, dA_qk.to(dtype))
    if dA_kk_ptr is not None:
        tl.store(dA_kk_ptr + place, dA_kk.to(dtype))

    if dgate_ptr is not None:
        if erase_beta_ptr is not None:
            dA_kk *= load_scalars(erase_beta_ptr + scalars, steps, valid, HV)[None, :]
        q_ptr += head // (HV // HQ) * K
        if a_ptr is not None:
            a_ptr += (start * HA + head // (HV // HA)) * K
        b_ptr += (start * HB + head // (HV // HB)) * K
        qb = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        ab = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        for block in tl.static_range((K + BLOCK - 1) // BLOCK):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            b = load_tile(b_ptr, steps, valid, columns, HB * K, K, BLOCK)
            a = b
            if a_ptr is not None:
                a = load_tile(a_ptr, steps, valid, columns, HA * K, K, BLOCK)
            q = load_sub_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK, SUB_STEPS, SUB_STEPS - 1)
            qb = tl.dot(b, tl.trans(q), qb, input_precision=PRECISION)
            ab = tl.dot(b, tl.trans(a), ab, input_precision=PRECISION)
        dA_qk = tl.where(before, dA_qk * qb, 0.0)
        dA_kk = tl.where(before, dA_kk * ab, 0.0)

        # for each key the sum over queries from t on, then over the keys before t; float16 would lose small gradients
        sums_dtype: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float32
        not_earlier = (steps[:, None] >= steps[None, :]).to(sums_dtype)
        if READS_BEFORE:
            later = (steps[:, None] > steps[None, :]).to(sums_dtype)
            sums = tl.dot(dA_qk.to(sums_dtype), not_earlier, input_precision=PRECISION)
            sums += tl.dot(dA_kk.to(sums_dtype), later, input_precision=PRECISION)
        else:
            sums = tl.dot((dA_qk + dA_kk).to(sums_dtype), not_earlier, input_precision=PRECISION)
        dgate = tl.sum(tl.where(before, sums, 0.0), axis=0)
        micro_step = start + steps
        mask = valid
        if SUB_STEPS > 1:
            mask = mask & (micro_step % SUB_STEPS == 0)
        tl.store(dgate_ptr + micro_step // SUB_STEPS * HV + head, dgate, mask=mask)


class ScoreGradients(NamedTuple):
    """What the kernel makes.

    Attributes:
        dA_qk, dA_kk: transposed, [chunks, HV, C, C]; dA_kk is None without erase pairs.
        diagonal: of dA_qk under a diagonal decay, [B T n, HV] float32; None where dA_qk has it.
        v: dv, [B, T n, HV, V].
        write: dw, [B, T n, HV] in the dtype of w; None where that is None.
    """

    dA_qk: Tensor
    dA_kk: Tensor | None
    diagonal: Tensor | None
    v: Tensor
    write: Tensor | None


def score_gradients(
    operands: ScanOperands,
    grad: Tensor,
    u: Tensor,
    dR: Tensor | None,
    gate: Tensor | None,
    chunks: Spans,
    constants: dict[str, Any],
    *,
    scale: float,
    tiles: Tiles,
    max_registers: int | None = None,
    dgate: Tensor | None = None,
) -> ScoreGradients:
    """Gradients of scores; micro-steps of no document get zeros.

    Args:
        u, dR: U and dR; v and None without erase pairs.
        constants: the ``sizes`` of the operands.
        tiles: of the products.
        max_registers: unless a gate gets its gradient, which would spill.
        dgate: [B T, HV] float32 to fill with what the scores give to a scalar gate, or None.
    """
    q, a, b, v, erase_beta, write, *_ = operands
    heads, size, micro_steps = operands.num_heads, chunks.length, v.shape[0] * v.shape[1]
    dA, diagonal = q.new_empty(1 if dR is None else 2, chunks.count, heads, size, size), None
    if operands.log_decay is not None and gate is None:
        diagonal = chunks.array_like(q, micro_steps, heads, dtype=torch.float32)
    dv = u if dR is None else dR if write is None else chunks.array_like(dR)
    dwrite = None if write is None else chunks.array_like(write)
    grads = ScoreGradients(dA[0], None if dR is None else dA[1], diagonal, dv, dwrite)
    inputs = (q, a, b, v, u, grad, dR, erase_beta, write, gate)
    outputs = (grads.dA_qk, grads.dA_kk, diagonal, None if write is None else dv, dwrite, dgate)
    # q, a and b are read for a gate only
    width = v.shape[-1] if dgate is None else max(q.shape[-1], v.shape[-1])
    has_inner_decay = operands.reads_before_decay and gate is not None
    launch(
        _score_gradients_kernel,
        (chunks.count * heads,),
        (*inputs, *outputs, *chunks.place(scale), micro_steps),
        {**constants, "BLOCK": tiles.fitted_to(width), "READS_BEFORE": has_inner_decay},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        max_registers=max_registers if dgate is None else None,
    )
    return grads
