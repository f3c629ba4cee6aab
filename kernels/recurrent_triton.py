"""The recurrence itself, one token after another, forward only: for short prompts, decoding, and comparison.

    S <- S Diag(d_t) + v_t k_t^T        o_t = scale * S q_t

Work split: one program a (block of V, head, sequence); the state is a float32 tile [BLOCK_V, K] in registers. Bytes a
token and head: q, k, v, o and the gate once each, q and k again for every block of V; no tensor core is used, so long
prompts belong to the chunk form. Shapes: B T HV K V. Oracle: ``scan(form="recurrent")``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .additive_operands import AdditiveOperands
from .launch import launch
from .spans import batch_spans, ceil_div, power_of_2_from, whole_documents
from .tile_triton import DIAGONAL, FIXED, LOG2_E, SCALAR, decay_kind, locate


@triton.jit(do_not_specialize=["T", "spans_per_seq"])
def _recurrent_kernel(
    q_ptr,  # [tokens, HQ, K]
    k_ptr,  # [tokens, HK, K]
    v_ptr,  # [tokens, HV, V]
    log_decay_ptr,  # None | [HV] | [tokens, HV] | [tokens, HV, K]
    initial_ptr,  # [N, HV, V, K] float32, or None
    output_ptr,  # [tokens, HV, V]
    final_ptr,  # [N, HV, V, K] float32
    spans_ptr,  # [N, 4], or None for a batch
    scale,
    T,
    spans_per_seq,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DECAY: tl.constexpr,
):
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
        q = tl.load(q_ptr + (token * HQ + head // (HV // HQ)) * K + columns, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + (token * HK + head // (HV // HK)) * K + columns, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + (token * HV + head) * V + v_columns, mask=mask_v, other=0.0).to(tl.float32)
        if DECAY == FIXED:
            state *= decay
        elif DECAY == SCALAR:
            state *= tl.exp2(tl.load(log_decay_ptr + token * HV + head).to(tl.float32) * LOG2_E)
        elif DECAY == DIAGONAL:
            gate = tl.load(log_decay_ptr + (token * HV + head) * K + columns, mask=mask, other=0.0)
            state *= tl.exp2(gate.to(tl.float32) * LOG2_E)[None, :]
        state += v[:, None] * k[None, :]
        output = tl.sum(state * q[None, :], axis=1) * scale
        tl.store(output_ptr + (token * HV + head) * V + v_columns, output.to(output_ptr.dtype.element_ty), mask=mask_v)
    tl.store(final_ptr + state_offset, state, mask=mask_state)


def recurrent_forward(operands: AdditiveOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, T, HV, V] in the dtype of q, final state [N, HV, V, K] float32."""
    q, k, v, log_decay, initial_state, cu_seqlens = operands.contiguous()
    (batch, seq_len, heads, value_dim), key_dim = v.shape, q.shape[-1]
    spans = batch_spans(batch, seq_len, seq_len) if cu_seqlens is None else whole_documents(cu_seqlens, seq_len, 16)
    make = torch.empty_like if cu_seqlens is None else torch.zeros_like
    output = make(v)
    final = operands.empty_state()
    block_k = max(16, power_of_2_from(key_dim))
    block_v = max(1, min(power_of_2_from(value_dim), 4096 // block_k))
    launch(
        _recurrent_kernel,
        (spans.count * heads * ceil_div(value_dim, block_v),),
        (
            *(q, k, v, log_decay, initial_state),
            output,
            final,
            spans.table,
            scale,
            seq_len,
            spans.per_sequence,
        ),
        {
            "HQ": q.shape[2],
            "HK": k.shape[2],
            "HV": heads,
            "K": key_dim,
            "V": value_dim,
            "BLOCK_K": block_k,
            "BLOCK_V": block_v,
            "DECAY": decay_kind(log_decay),
        },
        num_warps=4,
        num_stages=1,
    )
    return output, final
