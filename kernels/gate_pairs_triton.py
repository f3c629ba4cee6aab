"""What the pairs inside a chunk give to the gradient of a scalar gate, for all chunks at once.

    dg_t = sum over pairs j < t <= i of  scale dO_i^T U_j e^{L} q_i^T b_j  -  r_i dR_i^T U_j e^{L} a_i^T b_j

Each gate gets exactly the pairs that it lies between: the difference of two cumulative sums over rows would be the same
number, and under strong decay nothing but rounding. A row i that reads before its own decay leaves its own gate out.
A kernel by itself: beside the other gradients of a chunk these products spill (0.81 against 0.52 ms on an H200 at B8
T2048 H16 D128).

Work split: one program a (chunk, head). Bytes a row and head, 16-bit, K = V = 128: reads q, a, b, U, dO, dR (1536; 1280
where a is b), writes 4, which is the floor. Shapes: B T HV K V, n micro-steps a token, R = T n rows, C chunk.
Oracle: autograd through ``chunk.py``.
"""

import triton
import triton.language as tl
from torch import Tensor

from .delta_operands import DeltaOperands
from .launch import launch
from .launch_config import Tiles, device_family, products_in
from .spans import Spans
from .tile_triton import between, load_gate, load_gate_before, load_rows, load_scalars, load_step, locate


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "rows"])
def _gate_pairs_kernel(
    q_ptr,  # [tokens, HQ, K]
    a_ptr,  # [rows, HA, K]
    b_ptr,  # [rows, HB, K]
    corrected_ptr,  # U, [rows, HV, V]
    grad_ptr,  # dO, [tokens, HV, V]
    residual_ptr,  # dR, [rows, HV, V]
    rate_ptr,  # [rows, HV], or None for 1
    gate_ptr,  # [2, HV, rows] of cumulative_gate
    dgate_ptr,  # [HV, tokens] float32
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    rows,
    HQ: tl.constexpr,
    HA: tl.constexpr,
    HB: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    READS_BEFORE: tl.constexpr,
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
    count = (end - start).to(tl.int32)
    valid = steps < count
    dtype: tl.constexpr = b_ptr.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    before = steps[:, None] < steps[None, :]  # rows are keys j, columns queries i
    q_ptr += head // (HV // HQ) * K
    a_ptr += (start * HA + head // (HV // HA)) * K
    b_ptr += (start * HB + head // (HV // HB)) * K
    grad_ptr += head * V
    corrected_ptr += (start * HV + head) * V
    residual_ptr += (start * HV + head) * V

    reads = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    erasures = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.static_range((V + BLOCK - 1) // BLOCK):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        u = load_rows(corrected_ptr, steps, valid, columns, HV * V, V, BLOCK)
        grad = load_step(grad_ptr, start, steps, valid, columns, HV * V, V, BLOCK, STEPS, STEPS - 1)
        residual = load_rows(residual_ptr, steps, valid, columns, HV * V, V, BLOCK)
        reads = tl.dot(u, tl.trans(grad), reads, input_precision=PRECISION)
        erasures = tl.dot(u, tl.trans(residual), erasures, input_precision=PRECISION)
    high, low, _, _ = load_gate(gate_ptr, start, head, steps, count, rows, HV)
    factor = tl.exp2(tl.where(before, -between(high, low, high, low, EXACT), 0.0))
    reads *= factor * scale
    if READS_BEFORE:
        read, read_low = load_gate_before(gate_ptr, start, head, steps, count, rows, HV)
        factor = tl.exp2(tl.where(before, -between(high, low, read, read_low, EXACT), 0.0))
    erasures *= factor
    if rate_ptr is not None:
        erasures *= load_scalars(rate_ptr + start * HV + head, steps, valid, HV)[None, :]

    read_products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    erase_products = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    for block in tl.static_range((K + BLOCK - 1) // BLOCK):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        b = load_rows(b_ptr, steps, valid, columns, HB * K, K, BLOCK)
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
        sums -= tl.dot(erasures.to(sums_dtype), later, input_precision=PRECISION)
    else:
        sums = tl.dot((reads - erasures).to(sums_dtype), not_earlier, input_precision=PRECISION)
    dgate = tl.sum(tl.where(before, sums, 0.0), axis=0)
    row = start + steps
    mask = valid
    if STEPS > 1:
        mask = mask & (row % STEPS == 0)
    tl.store(dgate_ptr + head * (rows // STEPS) + row // STEPS, dgate, mask=mask)


def gate_pairs(
    operands: DeltaOperands,
    grad: Tensor,
    corrected: Tensor,
    residual: Tensor,
    gate: Tensor,
    chunks: Spans,
    dgate: Tensor,
    *,
    scale: float,
    tiles: Tiles,
) -> None:
    """Fill ``dgate`` [HV, B T]; entries of tokens of no document stay as they are."""
    q, a, b, v, rate, *_ = operands
    a = b if a is None else a
    launch(
        _gate_pairs_kernel,
        (chunks.count * v.shape[2],),
        (
            *(q, a, b, corrected, grad, residual, rate, gate, dgate),
            chunks.table,
            scale,
            chunks.seq_len,
            chunks.per_sequence,
            v.shape[0] * v.shape[1],
        ),
        {
            "HQ": q.shape[2],
            "HA": a.shape[2],
            "HB": b.shape[2],
            "HV": v.shape[2],
            "K": q.shape[-1],
            "V": v.shape[-1],
            "CHUNK": chunks.length,
            "BLOCK": tiles.block,
            "STEPS": operands.num_steps,
            "READS_BEFORE": operands.reads_before_decay,
            "PRECISION": products_in(q.dtype, device_family(q.device)),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
