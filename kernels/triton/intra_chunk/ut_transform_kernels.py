"""The UT transform of every chunk: the triangular solve, and its products with scores and keys.

    A_kk_ij = beta_i a_i^T Gamma_ij b_j  (j < i)               L = I + A_kk
    A_qk_ij = scale q_i^T Gamma_ij b_j  (j <= i)

With R = w v - (beta a from_start) S0^T the pseudo-values are U = L^-1 R, so that o = scale (q from_start) S0^T + A_qk U
and S1 = S0 total + U^T (b to_end) become

    o = scale (q from_start) S0^T + (A_qk L^-1) R          S1 = S0 total + R^T key,    key = L^-T (b to_end)

and a scan has no triangular system to solve: the delta family is the additive family with other scores and other keys.
(The papers' T is L^-1 Diag(beta), and their W and U are T K and T V: here L^-1 goes to the other side.)
Rounding A_qk L^-1 and key to 16 bits is also safer than rounding L^-1 and U: where keys repeat, entries of L^-1 of
order one cancel in both products, which is over by then. (64 equal keys, beta 1, bfloat16: outputs off by 2e-3; through
L^-1 and U, 1e-2.)

L^-1 takes the place of A_kk, which is stored first, by X <- X - (X A_kk X between the halves of each block of 2w
micro-steps), w = 1, 2, 4 ... C / 2: X_21 = -X_22 A_21 X_11 in each block. X is exact at every w and unit keys keep its
entries at 2 or below (powers of A_kk would reach 1e20 for equal keys and beta = 2). Up to w = 8 blocks of 16 are
multiplied whole, as no matrix unit takes less, and masked after, so that A_kk is split once for all w; from w = 16 on
the halves alone are. C = 64 takes 44 products of 16^3; substitution by rows of blocks takes 64.
Where keys repeat and beta is 2, errors of products grow to 3e-4 in L^-1 for three products of tf32 (of operands as two
parts each, high and low), to 1e-2 for three of bfloat16 and 6e-2 for one of tf32 (simulated). Parts in float16 have as
many bits as in tf32 and multiply twice as fast. They are taken for 16-bit inputs where no decay makes A_kk small: what
is below 6e-8 in it gets lost, and above 65504 overflows; unit keys keep A_kk, L^-1 and L^-1 A_kk at 2.
For 16-bit inputs L^-1 takes part in both products as two parts, high and low. For float32 inputs L^-1, and A_kk unless
a diagonal decay has made it, come from products without tensor cores: tensor cores cut off what they add up, always
towards 0, and 4096 reflections then took 1.7e-4 of the norm of a state that they should keep.

A scalar decay waits until the end, since Gamma_ik Gamma_kj = Gamma_ij: with A_kk, L and A_qk as without a decay,

    A_qk L^-1 <- (A_qk L^-1) Gamma        key <- to_end (L^-T b)        U = (L^-1 Gamma) R

unless micro-steps read before their own decay: then A_kk has factors of another kind. Limit: entries of L^-1 without
the decay stay below 65504 for 16-bit inputs, for which |beta a^T b| <= 2 is enough, as of unit keys; what only a decay
keeps in bounds overflows.

Work split: ``triangular_inverse_kernel``, one warp a (chunk, head), so that nothing waits at a barrier;
``ut_transform_kernel``, four. Bytes a micro-step and head, 16-bit, K = 128, C = 64: a and b read (512; 256 where a is
b; the caches are asked 1.5 times), L^-1 written (256; the caches keep A_kk and the blocks of L^-1 that are read back,
352); L^-1, q and b read (768), A_qk L^-1 and key written (384), L^-1 in 16 bits for the backward pass (128). Floor: q,
a and b read (512 or 768), A_qk L^-1, key and the last written. Under a diagonal decay ``channel_scores`` has made A_qk,
A_kk and b to_end, and 160 + 256 + 256 are read in their place.

from_start, to_end and total are the decays from the chunk's start to a micro-step, from there to its end, and across
it; Gamma is the decay between two micro-steps (``decay.py``). One that reads before its decay leaves its own gate out
of Gamma and from_start. A_qk and dO are zero but for the last micro-step of each token.
Shapes: B T HV K, n micro-steps a token, C chunk of 16, 32 or 64.
Oracle: ``chunk.py`` (triangular solve). Source: arXiv:2406.06484 section 3.2, arXiv:2412.06464 section 3.
"""

import triton
import triton.language as tl

from statemix.kernels.triton.primitives.gates import DIAGONAL, SCALAR, between, load_gate
from statemix.kernels.triton.primitives.loads import load_scalars, load_sub_step, load_tile, locate_chunk, low_part


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
def _invert_blocks(A_kk_ptr, L_inv_ptr, NUM: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr):
    """L^-1 of NUM diagonal blocks of 16 micro-steps, one after another in memory, side by side in registers."""
    blocks = (tl.arange(0, NUM) * (16 * (CHUNK + 1)))[:, None, None]
    steps = tl.arange(0, 16)
    row, column = steps[None, :, None], steps[None, None, :]
    place = blocks + (row * CHUNK + column)
    A_kk = tl.where(row > column, tl.load(A_kk_ptr + place), 0.0)
    L_inv = tl.where(row == column, 1.0, 0.0) - tl.where((row ^ column) == 1, A_kk, 0.0)
    for level in tl.static_range(1, 4):
        product = _exact_dot(_exact_dot(L_inv, A_kk, EXACT), L_inv, EXACT)
        L_inv -= tl.where(((row ^ column) >> level) == 1, product, 0.0)
    tl.store(L_inv_ptr + place, L_inv)


@triton.jit
def _join_blocks(A_kk_ptr, L_inv_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr):
    """L^-1 of 2 WIDTH micro-steps from those of the two halves, which it finds in place."""
    A_kk = tl.load(_block(A_kk_ptr + WIDTH * CHUNK, WIDTH, CHUNK))
    first = tl.load(_block(L_inv_ptr, WIDTH, CHUNK))
    second = tl.load(_block(L_inv_ptr + WIDTH * (CHUNK + 1), WIDTH, CHUNK))
    product = _exact_dot(_exact_dot(second, A_kk, EXACT), first, EXACT)
    tl.store(_block(L_inv_ptr + WIDTH * CHUNK, WIDTH, CHUNK), 0.0 - product)
    tl.store(_block(L_inv_ptr + WIDTH, WIDTH, CHUNK), tl.zeros_like(product))


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "micro_steps"])
def triangular_inverse_kernel(
    a_ptr,  # [micro_steps, HA, K]; None under a diagonal decay
    b_ptr,  # [micro_steps, HB, K]; None under a diagonal decay
    erase_beta_ptr,  # [micro_steps, HV], or None for 1
    gate_ptr,  # a scalar decay that micro-steps read before: [2, HV, micro_steps] of cumulative_gate; else None
    A_kk_ptr,  # diagonal decay: [chunks, HV, C, C] float32; else None
    L_inv_ptr,  # L^-1, [chunks, HV, C, C] float32
    chunks_ptr,  # [chunks, 4], or None for a batch
    T,
    chunks_per_seq,
    micro_steps,
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
    L_inv_ptr += (chunk * HV + head) * CHUNK * CHUNK
    if DECAY == DIAGONAL:
        A_kk_ptr += (chunk * HV + head) * CHUNK * CHUNK
    else:
        A_kk_ptr = L_inv_ptr
        a_ptr += (start * HA + head // (HV // HA)) * K
        b_ptr += (start * HB + head // (HV // HB)) * K
        if erase_beta_ptr is not None:
            erase_beta_ptr += start * HV + head
        low_offset = HV * micro_steps.to(tl.int64)
        if DECAY == SCALAR:
            gate_ptr += head * micro_steps + start
        steps = tl.arange(0, ROWS)
        for block_index in tl.range((CHUNK // ROWS) * (CHUNK // ROWS + 1) // 2, num_stages=1):
            i, j = (block_index + 1) // 2 * ROWS, block_index // 2 * ROWS  # blocks (0, 0), (1, 0), (1, 1)
            A_kk = tl.zeros([ROWS, ROWS], dtype=tl.float32)
            for block in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=1):
                columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
                a = load_tile(a_ptr + i * (HA * K), steps, steps < count - i, columns, HA * K, K, BLOCK_K)
                b = load_tile(b_ptr + j * (HB * K), steps, steps < count - j, columns, HB * K, K, BLOCK_K)
                A_kk = tl.dot(a, tl.trans(b), A_kk, input_precision=PRECISION)
            row, column = i + steps, j + steps
            A_kk *= load_scalars(erase_beta_ptr, row, row < count, HV)[:, None]
            if DECAY == SCALAR:
                reads = tl.maximum(tl.minimum(row - 1, count - 1), 0)
                writes = tl.minimum(column, count - 1)
                lag = tl.load(gate_ptr + reads)[:, None] - tl.load(gate_ptr + writes)[None, :]
                lag += tl.load(gate_ptr + low_offset + reads)[:, None]
                lag -= tl.load(gate_ptr + low_offset + writes)[None, :]
                A_kk *= tl.exp2(tl.where(row[:, None] > column[None, :], lag, 0.0))
            tl.store(_block(L_inv_ptr + (i * CHUNK + j), ROWS, CHUNK), A_kk)
        tl.debug_barrier()  # stored by other lanes than load it, here and below
    for part in tl.range(CHUNK // ROWS, num_stages=1):
        place = part * (ROWS * (CHUNK + 1))
        _invert_blocks(A_kk_ptr + place, L_inv_ptr + place, ROWS // 16, CHUNK, EXACT)
        if ROWS == 32:
            tl.debug_barrier()
            _join_blocks(A_kk_ptr + place, L_inv_ptr + place, 16, CHUNK, EXACT)
    if CHUNK == 64:
        tl.debug_barrier()
        _join_blocks(A_kk_ptr, L_inv_ptr, 32, CHUNK, EXACT)


@triton.jit(do_not_specialize=["T", "chunks_per_seq", "micro_steps"])
def ut_transform_kernel(
    q_ptr,  # [tokens, HQ, K]; None under a diagonal decay
    b_ptr,  # [micro_steps, HB, K]; b to_end, [micro_steps, HV, K], under a diagonal decay
    gate_ptr,  # scalar decay: [2, HV, micro_steps] of cumulative_gate; else None
    A_qk_ptr,  # diagonal decay: [chunks, HV, C, C] float32; else None
    L_inv_ptr,  # L^-1, [chunks, HV, C, C] float32
    scores_ptr,  # A_qk L^-1, [chunks, HV, C, C]
    key_ptr,  # L^-T (b to_end), [micro_steps, HV, K]
    L_inv_16_ptr,  # L^-1 in the dtype of q, [chunks, HV, C, C], or None
    chunks_ptr,  # [chunks, 4], or None for a batch
    scale,
    T,
    chunks_per_seq,
    micro_steps,
    HQ: tl.constexpr,
    HB: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUB_STEPS: tl.constexpr,
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
    to_end = tl.full([CHUNK], 1.0, tl.float32)
    if DECAY == DIAGONAL:
        A_qk = tl.load(A_qk_ptr + place)
    else:
        q_ptr += head // (HV // HQ) * K
        A_qk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        for block in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
            columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
            q = load_sub_step(q_ptr, start, steps, valid, columns, HQ * K, K, BLOCK_K, SUB_STEPS, SUB_STEPS - 1)
            b = load_tile(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
            A_qk = tl.dot(q, tl.trans(b), A_qk, input_precision=PRECISION)
        A_qk *= scale
        if DECAY == SCALAR:
            if READS_BEFORE:
                high, low, high_end, low_end = load_gate(gate_ptr, start, head, steps, count, micro_steps, HV)
                to_end = tl.exp2(high_end - high + (low_end - low))
                A_qk *= tl.exp2(tl.where(not_earlier, between(high, low, high, low, True), 0.0))
    A_qk = tl.where(not_earlier, A_qk, 0.0)
    L_inv = tl.load(L_inv_ptr + place)
    L_inv_high, A_qk_high = L_inv.to(dtype), A_qk.to(dtype)
    scores = tl.dot(A_qk_high, L_inv_high, input_precision=PRECISION)
    if IS_SPLIT:
        L_inv_low = low_part(L_inv, L_inv_high)
        scores = tl.dot(A_qk_high, L_inv_low, scores)
        scores = tl.dot(low_part(A_qk, A_qk_high), L_inv_high, scores)
    if DECAY == SCALAR:
        if not READS_BEFORE:
            high, low, high_end, low_end = load_gate(gate_ptr, start, head, steps, count, micro_steps, HV)
            to_end = tl.exp2(high_end - high + (low_end - low))
            scores *= tl.exp2(tl.where(not_earlier, between(high, low, high, low, True), 0.0))
    tl.store(scores_ptr + place, scores.to(dtype))
    if L_inv_16_ptr is not None:
        if DECAY == SCALAR and not READS_BEFORE:
            L_inv = tl.load(L_inv_ptr + place)  # anew, and the gate: kept through the products, they would spill
            high, low, _, _ = load_gate(gate_ptr, start, head, steps, count, micro_steps, HV)
            L_inv *= tl.exp2(tl.where(not_earlier, between(high, low, high, low, True), 0.0))
            tl.store(L_inv_16_ptr + place, L_inv.to(dtype))
        else:
            tl.store(L_inv_16_ptr + place, L_inv_high)
    if DECAY == SCALAR:
        if READS_BEFORE:
            L_inv = tl.load(L_inv_ptr + place) * to_end[:, None]
            L_inv_high = L_inv.to(dtype)
            if IS_SPLIT:
                L_inv_low = low_part(L_inv, L_inv_high)
    key_ptr += (start * HV + head) * K
    for block in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
        if DECAY == DIAGONAL or K > BLOCK_K:  # else b is here
            b = load_tile(b_ptr, steps, valid, columns, HB * K, K, BLOCK_K)
        # its transpose, b^T L^-1: L^-1 lies where it did for the scores
        key = tl.dot(tl.trans(b), L_inv_high, input_precision=PRECISION)
        if IS_SPLIT:
            key = tl.dot(tl.trans(b), L_inv_low, key)
        if DECAY == SCALAR:
            if not READS_BEFORE:
                key *= to_end[None, :]
        mask = (columns < K)[:, None] & valid[None, :]
        tl.store(key_ptr + steps[None, :] * (HV * K) + columns[:, None], key.to(dtype), mask=mask)
