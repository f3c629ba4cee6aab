"""What erasures make of the rows of a chunk, for all chunks at once: an inverse, and its products with q and b.

    A_ij = r_i a_i^T e^{L} b_j  (j < i)          T = (I + A)^-1
    P_ij = scale q_i^T e^{L} b_j  (j <= i)       Q = P T        W = T^T (b rest)

With R = w v - (r a reach) S0^T the corrected values are U = T R, so that o = scale (q reach) S0^T + P U
and S1 = S0 total + U^T (b rest) become

    o = scale (q reach) S0^T + Q R          S1 = S0 total + R^T W

and a walk has no triangular system to solve: the delta family is the additive family with other pairs and other keys.
Rounding Q and W to 16 bits is also safer than rounding T and U: where keys repeat, entries of T of order one cancel in
both products, which is over by then. (64 equal keys, beta 1, bfloat16: outputs off by 2e-3; through T and U, 1e-2.)

T takes the place of A, which is stored first, by X <- X - (X A X between the halves of each block of 2w rows), w = 1,
2, 4 ... C / 2: T_21 = -T_22 A_21 T_11 in each block. X is exact at every w and unit keys keep its entries at 2 or below
(powers of A would reach 1e20 for equal keys and beta = 2). Up to w = 8 blocks of 16 rows are multiplied whole, as no
matrix unit takes less, and masked after, so that A is split once for all w; from w = 16 on the halves alone are. C = 64
takes 44 products of 16^3; substitution by rows of blocks, T_i = T_ii (I - A_i T), takes 64.
Where keys repeat and beta is 2, errors of products grow to 3e-4 in T for three products of tf32 (of operands as two
parts each, high and low), to 1e-2 for three of bfloat16 and 6e-2 for one of tf32 (simulated). Parts in float16 have as
many bits as in tf32 and multiply twice as fast. They are taken for 16-bit inputs where no decay makes A small: what is
below 6e-8 in it gets lost, and above 65504 overflows; unit keys keep A, T and T A at 2.
For 16-bit inputs T takes part in Q and W as two parts, high and low. For float32 inputs T, and A unless a diagonal
decay has made it, come from products without tensor cores: tensor cores cut off what they add up, always towards 0, and
4096 reflections then took 1.7e-4 of the norm of a state that they should keep.

A scalar decay waits until the end, since e^L_ik e^L_kj = e^L_ij: with A, T and P as without a decay,

    Q <- (P T) e^L        W <- rest (T^T b)        U = (T e^L) R

unless rows read before their own decay: then A has factors of another kind. Limit: entries of T without the decay stay
below 65504 for 16-bit inputs, for which |r a^T b| <= 2 is enough, as of unit keys; what only a decay keeps in bounds
overflows.

Work split: ``_inverse_kernel``, one warp a (chunk, head), so that nothing waits at a barrier; ``_products_kernel``,
four. Bytes a row and head, 16-bit, K = 128, C = 64: a and b read (512; 256 where a is b; the caches are asked 1.5
times), T written (256; the caches keep A and the blocks of T that are read back, 352); T, q and b read (768), Q and W
written (384), T in 16 bits for the backward pass (128). Floor: q, a and b read (512 or 768), Q, W and the last written.
Under a diagonal decay ``channel_pairs`` has made P, A and b rest, and 160 + 256 + 256 are read in their place.

reach, rest and total are the decays from the chunk's start to a row, from a row to its end, and across it; e^L is the
decay between two rows (``decay.py``). A row that reads before its decay leaves its own gate out of L and reach. P and
dO have rows at the last micro-step of each token only.
Shapes: B T HV K, n micro-steps a token, R = T n rows, C chunk of 16, 32 or 64.
Oracle: ``chunk.py`` (triangular solve). Source: arXiv:2406.06484 section 3.2, with T moved to the other side.
"""

import triton
import triton.language as tl

from statemix.kernels.triton.primitives.gates import DIAGONAL, SCALAR, between, load_gate
from statemix.kernels.triton.primitives.loads import load_rows, load_scalars, load_step, locate_chunk, low_part


@triton.jit
def _exact_dot(x, y, PRECISION: tl.constexpr):
    """x y in float32, or of parts in float16 as in tf32x3."""
    if PRECISION == "float16x3":
        x_high, y_high = x.to(tl.float16), y.to(tl.float16)
        product = tl.dot(low_part(x, x_high), y_high)
        product = tl.dot(x_high, low_part(y, y_high), product)
        product = tl.dot(x_high, y_high, product)
    else:
        product = tl.dot(x, y, input_precision=PRECISION)
    return product


@triton.jit
def _block(ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Where [WIDTH, WIDTH] of a [C, C] matrix lie from ``ptr`` on."""
    steps = tl.arange(0, WIDTH)
    return ptr + (steps[:, None] * CHUNK + steps[None, :])


@triton.jit
def _invert_blocks(erasures_ptr, inverse_ptr, NUM: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr):
    """T of NUM diagonal blocks of 16 rows, one after another in memory, side by side in registers."""
    blocks = (tl.arange(0, NUM) * (16 * (CHUNK + 1)))[:, None, None]
    steps = tl.arange(0, 16)
    row, column = steps[None, :, None], steps[None, None, :]
    place = blocks + (row * CHUNK + column)
    erasures = tl.where(row > column, tl.load(erasures_ptr + place), 0.0)
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where((row ^ column) == 1, erasures, 0.0)
    for level in tl.static_range(1, 4):
        product = _exact_dot(_exact_dot(inverse, erasures, EXACT), inverse, EXACT)
        inverse -= tl.where(((row ^ column) >> level) == 1, product, 0.0)
    tl.store(inverse_ptr + place, inverse)


@triton.jit
def _join_blocks(erasures_ptr, inverse_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr):
    """T of 2 WIDTH rows from those of the two halves, which it finds in place."""
    erasures = tl.load(_block(erasures_ptr + WIDTH * CHUNK, WIDTH, CHUNK))
    first = tl.load(_block(inverse_ptr, WIDTH, CHUNK))
    second = tl.load(_block(inverse_ptr + WIDTH * (CHUNK + 1), WIDTH, CHUNK))
    product = _exact_dot(_exact_dot(second, erasures, EXACT), first, EXACT)
    tl.store(_block(inverse_ptr + WIDTH * CHUNK, WIDTH, CHUNK), 0.0 - product)
    tl.store(_block(inverse_ptr + WIDTH, WIDTH, CHUNK), tl.zeros_like(product))


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "rows"])
def _inverse_kernel(
    a_ptr,  # [rows, HA, K]; None under a diagonal decay
    b_ptr,  # [rows, HB, K]; None under a diagonal decay
    rate_ptr,  # [rows, HV], or None for 1
    gate_ptr,  # a scalar decay that rows read before: [2, HV, rows] of cumulative_gate; else None
    erasures_ptr,  # diagonal decay: A, [chunks, HV, C, C] float32; else None
    inverse_ptr,  # T, [chunks, HV, C, C] float32
    chunks_ptr,  # [chunks, 4], or None for a batch
    T,
    chunks_per_seq,
    rows,
    HA: tl.constexpr,
    HB: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DECAY: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    pid = tl.program_id(0)
    head = (pid % HV).to(tl.int64)
    start, end, chunk = locate_chunk(pid // HV, chunks_ptr, T, chunks_per_seq, CHUNK)
    if start >= end:
        return
    count = (end - start).to(tl.int32)
    ROWS: tl.constexpr = 16 if CHUNK == 16 else 32
    inverse_ptr += (chunk * HV + head) * CHUNK * CHUNK
    if DECAY == DIAGONAL:
        erasures_ptr += (chunk * HV + head) * CHUNK * CHUNK
    else:
        erasures_ptr = inverse_ptr
        a_ptr += (start * HA + head // (HV // HA)) * K
        b_ptr += (start * HB + head // (HV // HB)) * K
        if rate_ptr is not None:
            rate_ptr += start * HV + head
        low_offset = HV * rows.to(tl.int64)
        if DECAY == SCALAR:
            gate_ptr += head * rows + start
        steps = tl.arange(0, ROWS)
        for pair in tl.range((CHUNK // ROWS) * (CHUNK // ROWS + 1) // 2, num_stages=1):
            i, j = (pair + 1) // 2 * ROWS, pair // 2 * ROWS  # blocks (0, 0), (1, 0), (1, 1)
            erasures = tl.zeros([ROWS, ROWS], dtype=tl.float32)
            for block in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=1):
                columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
                a = load_rows(a_ptr + i * (HA * K), steps, steps < count - i, columns, HA * K, K, BLOCK_K)
                b = load_rows(b_ptr + j * (HB * K), steps, steps < count - j, columns, HB * K, K, BLOCK_K)
                erasures = tl.dot(a, tl.trans(b), erasures, input_precision=PRECISION)
            row, column = i + steps, j + steps
            erasures *= load_scalars(rate_ptr, row, row < count, HV)[:, None]
            if DECAY == SCALAR:
                reads = tl.maximum(tl.minimum(row - 1, count - 1), 0)
                writes = tl.minimum(column, count - 1)
                lag = tl.load(gate_ptr + reads)[:, None] - tl.load(gate_ptr + writes)[None, :]
                lag += tl.load(gate_ptr + low_offset + reads)[:, None]
                lag -= tl.load(gate_ptr + low_offset + writes)[None, :]
                erasures *= tl.exp2(tl.where(row[:, None] > column[None, :], lag, 0.0))
            tl.store(_block(inverse_ptr + (i * CHUNK + j), ROWS, CHUNK), erasures)
        tl.debug_barrier()  # stored by other lanes than load it, here and below
    for part in tl.range(CHUNK // ROWS, num_stages=1):
        place = part * (ROWS * (CHUNK + 1))
        _invert_blocks(erasures_ptr + place, inverse_ptr + place, ROWS // 16, CHUNK, EXACT)
        if ROWS == 32:
            tl.debug_barrier()
            _join_blocks(erasures_ptr + place, inverse_ptr + place, 16, CHUNK, EXACT)
    if CHUNK == 64:
        tl.debug_barrier()
        _join_blocks(erasures_ptr, inverse_ptr, 32, CHUNK, EXACT)


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "rows"])
def _products_kernel(
    q_ptr,  # [tokens, HQ, K]; None under a diagonal decay
    b_ptr,  # [rows, HB, K]; b rest, [rows, HV, K], under a diagonal decay
    gate_ptr,  # scalar decay: [2, HV, rows] of cumulative_gate; else None
    visible_ptr,  # diagonal decay: P, [chunks, HV, C, C] float32; else None
    inverse_ptr,  # T, [chunks, HV, C, C] float32
    pairs_ptr,  # Q, [chunks, HV, C, C]
    key_ptr,  # W, [rows, HV, K]
    narrow_ptr,  # T in the dtype of q, [chunks, HV, C, C], or None
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    rows,
    HQ: tl.constexpr,
    HB: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
    dtype: tl.constexpr = b_ptr.dtype.element_ty
    IS_SPLIT: tl.constexpr = dtype != tl.float32
    b_ptr += (start * HB + head // (HV // HB)) * K
    place = (chunk * HV + head) * CHUNK * CHUNK + steps[:, None] * CHUNK + steps[None, :]
    not_earlier = steps[:, None] >= steps[None, :]
    rest = tl.full([CHUNK], 1.0, tl.float32)
    if DECAY == DIAGONAL:
        visible = tl.load(visible_ptr + place)
    else:
        q_ptr += head // (HV // HQ) * K
        visible = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        for block in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
            columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
            q = load_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, STEPS, STEPS - 1)
            b = load_rows(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
            visible = tl.dot(q, tl.trans(b), visible, input_precision=PRECISION)
        visible *= scale
        if DECAY == SCALAR:
            if READS_BEFORE:
                high, low, high_end, low_end = load_gate(gate_ptr, start, head, steps, count, rows, HV)
                rest = tl.exp2(high_end - high + (low_end - low))
                visible *= tl.exp2(tl.where(not_earlier, between(high, low, high, low, True), 0.0))
    visible = tl.where(not_earlier, visible, 0.0)
    inverse = tl.load(inverse_ptr + place)
    inverse_high, visible_high = inverse.to(dtype), visible.to(dtype)
    pairs = tl.dot(visible_high, inverse_high, input_precision=PRECISION)
    if IS_SPLIT:
        inverse_low = low_part(inverse, inverse_high)
        pairs = tl.dot(visible_high, inverse_low, pairs)
        pairs = tl.dot(low_part(visible, visible_high), inverse_high, pairs)
    if DECAY == SCALAR:
        if not READS_BEFORE:
            high, low, high_end, low_end = load_gate(gate_ptr, start, head, steps, count, rows, HV)
            rest = tl.exp2(high_end - high + (low_end - low))
            pairs *= tl.exp2(tl.where(not_earlier, between(high, low, high, low, True), 0.0))
    tl.store(pairs_ptr + place, pairs.to(dtype))
    if narrow_ptr is not None:
        if DECAY == SCALAR and not READS_BEFORE:
            inverse = tl.load(inverse_ptr + place)  # anew, and the gate: kept through the products, they would spill
            high, low, _, _ = load_gate(gate_ptr, start, head, steps, count, rows, HV)
            inverse *= tl.exp2(tl.where(not_earlier, between(high, low, high, low, True), 0.0))
            tl.store(narrow_ptr + place, inverse.to(dtype))
        else:
            tl.store(narrow_ptr + place, inverse_high)
    if DECAY == SCALAR:
        if READS_BEFORE:
            inverse = tl.load(inverse_ptr + place) * rest[:, None]
            inverse_high = inverse.to(dtype)
            if IS_SPLIT:
                inverse_low = low_part(inverse, inverse_high)
    key_ptr += (start * HV + head) * K
    for block in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
        if DECAY == DIAGONAL or K > BLOCK_K:  # else b is here
            b = load_rows(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
        # W^T = b^T T: T lies where it did for Q
        key = tl.dot(tl.trans(b), inverse_high, input_precision=PRECISION)
        if IS_SPLIT:
            key = tl.dot(tl.trans(b), inverse_low, key)
        if DECAY == SCALAR:
            if not READS_BEFORE:
                key *= rest[None, :]
        mask = (columns < K)[:, None] & valid[None, :]
        tl.store(key_ptr + steps[None, :] * (HV * K) + columns[:, None], key.to(dtype), mask=mask)
