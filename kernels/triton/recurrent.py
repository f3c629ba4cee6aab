"""The recurrences themselves, one token after another, forward only: for short prompts, decoding, and comparison.

    additive   S <- S Diag(d_t) + v_t k_t^T                                              o_t = scale * S q_t
    delta      S <- S Diag(d_t), then for each micro-step of the token
               u = w v - beta S a,    S <- S + u b^T                                     o_t = scale * S q_t

One kernel runs both: additive is one micro-step a token, b = k, that erases nothing. Under READS_BEFORE the first
micro-step of a token reads the state from before its decay. Read-outs of the blocks of a head are written in float32,
and torch adds them up.

Work split: one program a (block of V, head, sequence); the state is a float32 tile [BLOCK_V, K] in registers. No tensor
core is used, so long prompts belong to the chunk form. Shapes: B T HO HV K V, N sequences, n micro-steps a token.

Bytes a token and head, for elements of e bytes. Floor, every tensor once: e (1 + n) (K + V), e n K more for an a of its
own, 4 n each for beta and w, 4 or 4 K for the gate. Every block of V asks for all but v and o again, and every value
head for the q, a and b that it shares; those programs are neighbours, so a cache can answer. For bfloat16, n = 1,
a = b, K = V = 128, beta, w and a scalar gate: floor 1036, asked for 2608. The state is read and written once a
sequence, at its floor of 8 K V = 131072, which is 99% of the bytes when decoding.

Oracle: ``scan(form="recurrent")`` for additive, ``oracle`` in ``tests/kernels/interpreted_delta.py`` for delta.
"""

import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans, ceil_div, power_of_2_from, whole_documents
from statemix.kernels.triton.primitives.gates import DIAGONAL, FIXED, LOG2_E, NO_DECAY, SCALAR
from statemix.kernels.triton.primitives.loads import locate
from statemix.kernels.triton.primitives.sizes import sizes, whole_block


@triton.jit
def _load_vector(ptr, micro_step, head, columns, mask, HEADS: tl.constexpr, HV: tl.constexpr, WIDTH: tl.constexpr):
    """What a head takes of a token or micro-step of a [.., HEADS, WIDTH] array, float32; 0 past WIDTH."""
    first = (micro_step * HEADS + head // (HV // HEADS)) * WIDTH
    return tl.load(ptr + first + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "spans_per_seq"])
def _recurrent_kernel(
    q_ptr,  # [tokens, HQ, K]
    a_ptr,  # [micro_steps, HA, K], or None for b
    b_ptr,  # [micro_steps, HB, K]
    v_ptr,  # [micro_steps, HO, V]
    erase_beta_ptr,  # [micro_steps, HV], or None for 1
    write_ptr,  # [micro_steps, HV], or None for 1
    log_decay_ptr,  # None | [HV] | [tokens, HV] | [tokens, HV, K]
    initial_ptr,  # [N, HV, V, K] float32, or None
    output_ptr,  # [tokens, HV, V]
    final_ptr,  # [N, HV, V, K] float32
    spans_ptr,  # [N, 4], or None for a batch
    scale,
    T,
    spans_per_seq,
    HQ: tl.constexpr,
    HA: tl.constexpr,
    HB: tl.constexpr,
    HO: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SUB_STEPS: tl.constexpr,  # n
    DECAY: tl.constexpr,
    ERASES: tl.constexpr,
    READS_BEFORE: tl.constexpr,
):
    """27 parameters: eight operands, two outputs, the span and the sizes of both families, whose recurrence is one."""
    BLOCKS_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = ((pid // BLOCKS_V) % HV).to(tl.int64)
    index = pid // (BLOCKS_V * HV)
    start, end, _ = locate(index, spans_ptr, T, spans_per_seq, spans_per_seq, T, 16, spans_ptr is not None)
    columns = tl.arange(0, BLOCK_K)
    v_columns = (pid % BLOCKS_V) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask, mask_v = columns < K, v_columns < V
    mask_state = mask_v[:, None] & mask[None, :]
    state_offset = (index.to(tl.int64) * HV + head) * K * V + v_columns[:, None] * K + columns[None, :]
    if initial_ptr is not None:
        state = tl.load(initial_ptr + state_offset, mask=mask_state, other=0.0)
    else:
        state = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    if DECAY == FIXED:
        decay = tl.exp2(tl.load(log_decay_ptr + head).to(tl.float32) * LOG2_E)
    for i in range((end - start).to(tl.int32)):
        token = start + i
        q = _load_vector(q_ptr, token, head, columns, mask, HQ, HV, K)
        if DECAY == SCALAR:
            decay = tl.exp2(tl.load(log_decay_ptr + token * HV + head).to(tl.float32) * LOG2_E)
        elif DECAY == DIAGONAL:
            decay = tl.exp2(_load_vector(log_decay_ptr, token, head, columns, mask, HV, HV, K) * LOG2_E)[None, :]
        read = state  # what the first micro-step of the token reads
        if DECAY != NO_DECAY:
            state *= decay
        if not READS_BEFORE:
            read = state
        for step in tl.static_range(SUB_STEPS):
            micro_step = token * SUB_STEPS + step
            b = _load_vector(b_ptr, micro_step, head, columns, mask, HB, HV, K)
            u = _load_vector(v_ptr, micro_step, head, v_columns, mask_v, HO, HV, V)
            if write_ptr is not None:
                u *= tl.load(write_ptr + micro_step * HV + head).to(tl.float32)
            if ERASES:
                a = b
                if a_ptr is not None:
                    a = _load_vector(a_ptr, micro_step, head, columns, mask, HA, HV, K)
                erased = tl.sum(read * a[None, :], axis=1)
                if erase_beta_ptr is not None:
                    erased *= tl.load(erase_beta_ptr + micro_step * HV + head).to(tl.float32)
                u -= erased
            state += u[:, None] * b[None, :]
            read = state
        output = tl.sum(state * q[None, :], axis=1) * scale
        tl.store(output_ptr + (token * HV + head) * V + v_columns, output.to(output_ptr.dtype.element_ty), mask=mask_v)
    tl.store(final_ptr + state_offset, state, mask=mask_state)


def recurrent_forward(operands: ScanOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, T, HO, V] in the dtype of q, final state [N, HV, V, K] float32."""
    operands = operands.contiguous()
    (batch, seq_len, _, key_dim), value_dim, heads = operands.q.shape, operands.v.shape[-1], operands.num_heads
    cu_seqlens, blocks = operands.cu_seqlens, operands.blocks
    if cu_seqlens is None:
        spans = Spans(seq_len, seq_len, per_sequence=1, count=batch)
    else:
        spans = whole_documents(cu_seqlens, seq_len, 16)
    final = operands.empty_state()
    output = operands.empty_output() if blocks == 1 else final.new_empty(batch, seq_len, heads, value_dim)
    if cu_seqlens is not None:
        output.zero_()  # no program has the tokens after the last document
    block_k = whole_block(key_dim)
    block_v = max(1, min(power_of_2_from(value_dim), 4096 // block_k))
    reads_before = operands.reads_before_decay and operands.log_decay is not None
    constants = {"BLOCK_K": block_k, "BLOCK_V": block_v, "ERASES": operands.erases, "READS_BEFORE": reads_before}
    launch(
        _recurrent_kernel,
        (spans.count * heads * ceil_div(value_dim, block_v),),
        (*operands[:8], output, final, *spans.place(scale)),
        sizes(operands, spans) | constants,
        num_warps=4,
        num_stages=1,
    )
    if blocks > 1:
        output = output.unflatten(2, (-1, blocks)).sum(3).to(operands.q.dtype)
    return output, final
