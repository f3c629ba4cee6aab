"""Gradients under a diagonal decay: what is launched. Equations stand with ``channel_gradients_kernel``."""

import torch
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans, ceil_div
from statemix.kernels.triton.primitives.sizes import sizes

from .channel_gradients_kernel import channel_gradients_kernel
from .delta_gradients import HeadGradients
from .score_gradients import score_gradients
from .steep_gradients import add_steep_gradients


def channel_gradients(
    operands: ScanOperands,
    grad: Tensor,
    u: Tensor,
    dR: Tensor | None,
    states: Tensor,
    grad_states: Tensor,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    score_tiles: Tiles,
    score_registers: int | None = None,
) -> HeadGradients:
    """Gradients of every query, erase and write pair and gate; micro-steps of no document get zeros.

    Args:
        u, dR: U and dR, [B, T n, HV, V]; without erase pairs v and None, and v has no gradient here.
        chunks: in micro-steps, of which a token has several: the first decays, the last has the query.
    """
    q, a, b, _, erase_beta, _, log_decay, *_ = operands
    assert log_decay is not None
    heads, blocks, micro_steps = operands.num_heads, ceil_div(q.shape[-1], tiles.block), u.shape[0] * u.shape[1]
    constants = sizes(operands, chunks) | {"BLOCK_K": tiles.block, "BLOCK_V": tiles.block}
    scores = score_gradients(
        operands, grad, u, dR, None, chunks, constants, scale=scale, tiles=score_tiles, max_registers=score_registers
    )
    dgate = chunks.array_like(log_decay, dtype=torch.float32)
    grads = HeadGradients.unwritten(operands, scores, dgate, chunks, blocks)
    steep = q.new_empty(blocks, chunks.count, heads, dtype=torch.int32)
    inputs = (q, a, b, u, grad, dR, erase_beta, log_decay, scores.dA_qk, scores.diagonal, scores.dA_kk)
    outputs = (grads.q, grads.a, grads.b, grads.erase_beta, dgate, steep)
    args = (*inputs, states, grad_states, *outputs, *chunks.place(scale), micro_steps)
    grid = (chunks.count * heads * blocks,)
    launch(channel_gradients_kernel, grid, args, constants, num_warps=tiles.num_warps, num_stages=1)
    add_steep_gradients(
        *(q, b, u, None, log_decay, grad, (grads.q, grads.b, None, dgate), steep, chunks),
        scale=scale,
        tiles=tiles,
        sub_steps=operands.num_steps,
        query_sub_steps=operands.num_steps,
    )
    if dR is not None:
        add_steep_gradients(
            *(b if a is None else a, b, u, erase_beta, log_decay, dR),
            *((grads.a, grads.b, grads.erase_beta, dgate), steep, chunks),
            scale=-1.0,
            tiles=tiles,
            sub_steps=operands.num_steps,
            reads_before=operands.reads_before_decay,
        )
    return grads
