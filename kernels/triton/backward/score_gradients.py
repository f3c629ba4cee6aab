"""Gradients of what two rows of a chunk have to do with each other, for all chunks at once.

    dP = scale lower(dO U^T) e^L         dA = -strictly_lower(dR U^T) e^L          dv = w dR          dw = v^T dR

    dg_t = sum over pairs j < t <= i of  dP_ij q_i^T b_j  +  r_i dA_ij a_i^T b_j

with e^L of a scalar decay: a diagonal one comes in with q, a and b, and its dP has no diagonal, which is stored by
itself. dP and dA are stored transposed, for the kernel that makes the other gradients: beside those their products
spill. A scalar gate gets exactly the pairs that it lies between: the difference of two cumulative sums over rows would
be the same number, and under strong decay nothing but rounding. A row i that reads before its own decay leaves its own
gate out.

Work split: one program a (chunk, head). Bytes a row and head, 16-bit, K = V = 128, C = 64: reads U, dO, dR (768; v for
dw, 256), writes dP, dA and dv (512), which is the floor; under a scalar decay also the gate (8), for whose gradient q,
a and b (768; 512 where a is b), and 4 written.
Shapes: B T HO HV K V, n micro-steps a token, R = T n rows, C chunk.
Oracle: autograd through ``chunk.py``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans
from statemix.kernels.triton.primitives.gates import SCALAR, between, decay_kind, load_gate, load_gate_before
from statemix.kernels.triton.primitives.loads import (
    load_rows,
    load_scalars,
    load_step,
    locate_chunk,
    store_value_gradients,
)


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "rows"])
def _pair_gradients_kernel(
    q_ptr,  # [tokens, HQ, K]; read for the gate only, as are a and b
    a_ptr,  # [rows, HA, K], or None for b
    b_ptr,  # [rows, HB, K]
    v_ptr,  # [rows, HO, V]
    corrected_ptr,  # U or v, [rows, HV, V]
    grad_ptr,  # dO, [tokens, HO, V]
    residual_ptr,  # dR, [rows, HV, V]; None without erasures
    rate_ptr,  # [rows, HV], or None for 1
    weight_ptr,  # [rows, HV], or None for 1: then dR is dv
    gate_ptr,  # scalar decay: [2, HV, rows] of cumulative_gate; else None
    reads_ptr,  # dP^T, [chunks, HV, C, C]
    erasures_ptr,  # dA^T, [chunks, HV, C, C]; None without erasures
    own_ptr,  # dP of a row with itself under a diagonal decay, [rows, HV] float32; else None, and it is in dP
    dv_ptr,  # [rows, HV, V]; None without weight
    dweight_ptr,  # [rows, HV]; None without weight
    dgate_ptr,  # [tokens, HV] float32, or None
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    rows,
    HQ: tl.constexpr,
    HA: tl.constexpr,
    HB: tl.constexpr,
    HO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    DECAY: tl.constexpr,
    READS_BEFORE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid % HV).to(tl.int64)
    start, end, chunk = locate_chunk(pid // HV, chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    steps = tl.arange(0, CHUNK)
    count = (end - start).to(tl.int32)
    valid = steps < count
    dtype: tl.constexpr = corrected_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    before, not_later = steps[:, None] < steps[None, :], steps[:, None] <= steps[None, :]  # rows j, columns i
    scalars = start * HV + head
    grad_ptr += head // (HV // HO) * V
    corrected_ptr += scalars * V
    if residual_ptr is not None:
        residual_ptr += scalars * V
    reads = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    erasures = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    if weight_ptr is not None:
        weight = load_scalars(weight_ptr + scalars, steps, valid, HV)
        dweight = tl.zeros([CHUNK], dtype=tl.float32)
    for block in tl.static_range((V + BLOCK - 1) // BLOCK):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        u = load_rows(corrected_ptr, steps, valid, columns, HV * V, V, BLOCK)
        grad = load_step(grad_ptr, start, steps, valid, columns, HO * V, V, BLOCK, STEPS, STEPS - 1)
        if residual_ptr is not None:  # loaded before the first product: after it, registers spill
            residual = load_rows(residual_ptr, steps, valid, columns, HV * V, V, BLOCK)
        reads = tl.dot(u, tl.trans(grad), reads, input_precision=PRECISION)
        if residual_ptr is not None:
            erasures = tl.dot(u, tl.trans(residual), erasures, input_precision=PRECISION)
        if weight_ptr is not None:
            dweight += store_value_gradients(
                residual, v_ptr, dv_ptr, weight, start, head, steps, valid, columns, HO, HV, V
            )
    if weight_ptr is not None:
        place = dweight_ptr + scalars + steps * HV
        tl.store(place, dweight.to(dweight_ptr.dtype.element_ty), mask=valid)
    reads *= scale
    if own_ptr is not None:
        own = tl.sum(tl.where(steps[:, None] == steps[None, :], reads, 0.0), axis=1)
        tl.store(own_ptr + scalars + steps * HV, own, mask=valid)
        reads = tl.where(before, reads, 0.0)
    else:
        reads = tl.where(not_later, reads, 0.0)
    erasures = tl.where(before, -erasures, 0.0)
    if DECAY == SCALAR:
        high, low, _, _ = load_gate(gate_ptr, start, head, steps, count, rows, HV)
        factor = tl.exp2(tl.where(before, -between(high, low, high, low, EXACT), 0.0))
        reads *= factor
        if READS_BEFORE:
            read, read_low = load_gate_before(gate_ptr, start, head, steps, count, rows, HV)
            factor = tl.exp2(tl.where(before, -between(high, low, read, read_low, EXACT), 0.0))
        erasures *= factor
    place = (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    tl.store(reads_ptr + place, reads.to(dtype))
    if erasures_ptr is not None:
        tl.store(erasures_ptr + place, erasures.to(dtype))

    if dgate_ptr is not None:
        if rate_ptr is not None:
            erasures *= load_scalars(rate_ptr + scalars, steps, valid, HV)[None, :]
        q_ptr += head // (HV // HQ) * K
        if a_ptr is not None:
            a_ptr += (start * HA + head // (HV // HA)) * K
        b_ptr += (start * HB + head // (HV // HB)) * K
        read_products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        erase_products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        for block in tl.static_range((K + BLOCK - 1) // BLOCK):
            columns = block * BLOCK + tl.arange(0, BLOCK)
            b = load_rows(b_ptr, steps, valid, columns, HB * K, K, BLOCK)
            a = b
            if a_ptr is not None:
                a = load_rows(a_ptr, steps, valid, columns, HA * K, K, BLOCK)
            q = load_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK, STEPS, STEPS - 1)
            read_products = tl.dot(b, tl.trans(q), read_products, input_precision=PRECISION)
            erase_products = tl.dot(b, tl.trans(a), erase_products, input_precision=PRECISION)
        reads = tl.where(before, reads * read_products, 0.0)
        erasures = tl.where(before, erasures * erase_products, 0.0)

        # for each key the sum over queries from t on, then over the keys before t; float16 would lose small gradients
        sums_dtype: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float32
        not_earlier = (steps[:, None] >= steps[None, :]).to(sums_dtype)
        if READS_BEFORE:
            later = (steps[:, None] > steps[None, :]).to(sums_dtype)
            sums = tl.dot(reads.to(sums_dtype), not_earlier, input_precision=PRECISION)
            sums += tl.dot(erasures.to(sums_dtype), later, input_precision=PRECISION)
        else:
            sums = tl.dot((reads + erasures).to(sums_dtype), not_earlier, input_precision=PRECISION)
        dgate = tl.sum(tl.where(before, sums, 0.0), axis=0)
        row = start + steps
        mask = valid
        if STEPS > 1:
            mask = mask & (row % STEPS == 0)
        tl.store(dgate_ptr + row // STEPS * HV + head, dgate, mask=mask)


class PairGradients(NamedTuple):
    """What the kernel makes.

    Attributes:
        reads, erasures: dP and dA, transposed, [chunks, HV, C, C]; dA is None without erasures.
        own: the diagonal of dP under a diagonal decay, [B R, HV] float32; None where it is in dP.
        v: dv, [B, R, HV, V].
        weight: dw, [B, R, HV] in the dtype of w; None where that is None.
    """

    reads: Tensor
    erasures: Tensor | None
    own: Tensor | None
    v: Tensor
    weight: Tensor | None


def pair_gradients(
    operands: ScanOperands,
    grad: Tensor,
    corrected: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    max_registers: int | None = None,
    dgate: Tensor | None = None,
) -> PairGradients:
    """Gradients of pairs of rows; rows of no document get zeros.

    Args:
        corrected, residual: U and dR; v and None without erasures.
        tiles: of the products.
        max_registers: unless a gate gets its gradient, which would spill.
        dgate: [B T, HV] float32 to fill with what the pairs give to a scalar gate, or None.
    """
    q, a, b, v, rate, weight, *_ = operands
    heads, size = operands.num_heads, chunks.length
    # q, a and b are read for a gate only
    block = tiles.fitted_to(v.shape[-1] if dgate is None else max(q.shape[-1], v.shape[-1]))
    pairs, own = q.new_empty(1 if residual is None else 2, chunks.count, heads, size, size), None
    if operands.log_decay is not None and gate is None:
        own = chunks.rows_like(q, v.shape[0] * v.shape[1], heads, dtype=torch.float32)
    made = PairGradients(
        pairs[0],
        None if residual is None else pairs[1],
        own,
        corrected if residual is None else residual if weight is None else chunks.rows_like(residual),
        None if weight is None else chunks.rows_like(weight),
    )
    launch(
        _pair_gradients_kernel,
        (chunks.count * heads,),
        (
            *(q, a, b, v, corrected, grad, residual, rate, weight, gate, made.reads, made.erasures, own),
            *(None if weight is None else made.v, made.weight, dgate),
            chunks.table,
            scale,
            chunks.seq_len,
            chunks.per_sequence,
            v.shape[0] * v.shape[1],
        ),
        {
            "HQ": q.shape[2],
            "HA": (b if a is None else a).shape[2],
            "HB": b.shape[2],
            "HO": v.shape[2],
            "HV": heads,
            "K": q.shape[-1],
            "V": v.shape[-1],
            "CHUNK": size,
            "BLOCK": block,
            "STEPS": operands.num_steps,
            "DECAY": decay_kind(operands.log_decay),
            "READS_BEFORE": operands.reads_before_decay and gate is not None,
            "PRECISION": products_in(q.dtype, device_arch(q.device)),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        max_registers=max_registers if dgate is None else None,
    )
    return made
