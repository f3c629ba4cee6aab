"""Cumulative sums of a scalar gate inside each chunk, in float64, kept as two float32 numbers.

    G_t = log2(e) * sum of log_decay_s over the tokens s <= t of the chunk;      high = f32(G), low = f32(G - high)

One pass, so that no other kernel scans. The sum is float64 because resets of -80 every few tokens make |G| large next
to the segment sums G_t - G_s that count: float32 alone would lose 1e-5 of the output.

Work split: one program a chunk and block of heads. Bytes a head: reads 2 or 4 a token, writes 8 a micro-step; a head of
128 channels in bfloat16 moves 1024. Shapes: HV value heads, C chunk. Oracle: ``decay.py``. Source: arXiv:2312.06635.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.spans import Spans, ceil_div, power_of_2_from

from .gates import bounded
from .loads import locate

HEADS = 16  # a block of heads is a run of memory


@triton.jit(do_not_specialize=["T", "spans_per_seq", "chunks_per_seq", "tokens"])
def _cumulative_gate_kernel(
    log_decay_ptr,  # [tokens, HV]
    gate_ptr,  # [2, HV, micro_steps] float32
    spans_ptr,  # [chunks, 4] or None
    T,
    spans_per_seq,
    chunks_per_seq,
    tokens,
    HV: tl.constexpr,
    CHUNK: tl.constexpr,
    SUB_STEPS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    IS_PACKED: tl.constexpr,
):
    pid = tl.program_id(0)
    blocks: tl.constexpr = (HV + BLOCK_H - 1) // BLOCK_H
    start, end, _ = locate(pid // blocks, spans_ptr, T, spans_per_seq, chunks_per_seq, CHUNK, CHUNK, IS_PACKED)
    micro_steps = start + tl.arange(0, CHUNK)
    heads = (pid % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = (micro_steps < end)[:, None] & (heads < HV)[None, :]
    decays = mask & (micro_steps % SUB_STEPS == 0)[:, None]
    log_decay = tl.load(
        log_decay_ptr + (micro_steps // SUB_STEPS)[:, None] * HV + heads[None, :], mask=decays, other=0.0
    )
    total = tl.cumsum(bounded(log_decay.to(tl.float64)), axis=0)
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    offsets = heads[None, :].to(tl.int64) * tokens + micro_steps[:, None]
    tl.store(gate_ptr + offsets, high, mask=mask)
    tl.store(gate_ptr + HV * tokens.to(tl.int64) + offsets, low, mask=mask)


def cumulative_gate(log_decay: Tensor, chunks: Spans, *, num_steps: int = 1) -> Tensor:
    """G as [2, HV, micro_steps] float32 for log_decay [B, T, HV]; micro-steps of no document stay unwritten.

    Args:
        chunks: in micro-steps, of which a token has ``num_steps``; the first of them decays.
    """
    heads = log_decay.shape[-1]
    gate = log_decay.new_empty(2, heads, log_decay.shape[0] * log_decay.shape[1] * num_steps, dtype=torch.float32)
    block = min(HEADS, power_of_2_from(heads))
    arguments = (log_decay.contiguous(), gate, chunks.table)
    launch(
        _cumulative_gate_kernel,
        (chunks.count * ceil_div(heads, block),),
        (*arguments, chunks.seq_len, chunks.per_sequence, chunks.per_sequence, gate.shape[2]),
        {
            "HV": heads,
            "CHUNK": chunks.length,
            "SUB_STEPS": num_steps,
            "BLOCK_H": block,
            "IS_PACKED": chunks.table is not None,
        },
        num_warps=4,
        num_stages=1,
    )
    return gate
