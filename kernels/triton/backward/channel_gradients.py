"""Launches the gradients under a diagonal decay."""

import torch
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans, ceil_div

from .channel_gradients_kernel import _channel_gradients_kernel
from .delta_gradients import RowGradients
from .score_gradients import PairGradients, pair_gradients
from .steep_gradients import add_steep_gradients


def channel_gradients(
    operands: ScanOperands,
    grad: Tensor,
    states: Tensor,
    grad_states: Tensor,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
) -> RowGradients:
    """Gradients of every query, key and gate without erase pairs, one micro-step a token; v has no gradient here."""
    v = operands.v
    pairs = pair_gradients(operands, grad, v, None, None, chunks, scale=scale, tiles=tiles)
    return _launch(operands, grad, v, None, states, grad_states, pairs, chunks, scale=scale, tiles=tiles)


def channel_row_gradients(
    operands: ScanOperands,
    grad: Tensor,
    corrected: Tensor,
    residual: Tensor,
    states: Tensor,
    grad_states: Tensor,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    pair_tiles: Tiles,
    pair_registers: int | None,
) -> RowGradients:
    """Gradients of every query, erasure, write and gate of the delta family; rows of no document get zeros.

    Args:
        corrected, residual: U and dR, [B, R, HV, V].
        chunks: in rows, of which a token has several: the first decays, the last has the query.
    """
    pairs = pair_gradients(
        *(operands, grad, corrected, residual, None, chunks),
        scale=scale,
        tiles=pair_tiles,
        max_registers=pair_registers,
    )
    return _launch(operands, grad, corrected, residual, states, grad_states, pairs, chunks, scale=scale, tiles=tiles)


def _launch(
    operands: ScanOperands,
    grad: Tensor,
    written: Tensor,
    residual: Tensor | None,
    states: Tensor,
    grad_states: Tensor,
    pairs: PairGradients,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
) -> RowGradients:
    """All kernels; without ``residual`` there are no erasures."""
    q, a, b, v, rate, _, log_decay, *_ = operands
    assert log_decay is not None
    (batch, rows, heads, value_dim), key_dim, steps = written.shape, b.shape[-1], operands.num_steps
    blocks, total = ceil_div(key_dim, tiles.block), batch * rows
    made = RowGradients(
        chunks.rows_like(q, *q.shape[:2], heads, key_dim),
        None if a is None else chunks.rows_like(b, batch, rows, heads, key_dim),
        chunks.rows_like(b, batch, rows, heads, key_dim),
        pairs.v,
        None if rate is None else chunks.rows_like(b, blocks, total, heads, dtype=torch.float32),
        pairs.weight,
        chunks.rows_like(log_decay, dtype=torch.float32),
    )
    steep = q.new_empty(blocks, chunks.count, heads, dtype=torch.int32)
    launch(
        _channel_gradients_kernel,
        (chunks.count * heads * blocks,),
        (
            *(q, a, b, written, grad, residual, rate, log_decay, pairs.reads, pairs.own, pairs.erasures),
            *(states, grad_states, made.q, made.a, made.b, made.rate, made.gate, steep),
            *(chunks.table, scale, chunks.seq_len, chunks.per_sequence, total),
        ),
        {
            "HQ": q.shape[2],
            "HA": (b if a is None else a).shape[2],
            "HB": b.shape[2],
            "HO": v.shape[2],
            "HV": heads,
            "K": key_dim,
            "V": value_dim,
            "CHUNK": chunks.length,
            "BLOCK_K": tiles.block,
            "BLOCK_V": tiles.block,
            "STEPS": steps,
            "READS_BEFORE": operands.reads_before_decay,
            "PRECISION": products_in(q.dtype, device_arch(q.device)),
        },
        num_warps=tiles.num_warps,
        num_stages=1,
    )
    assert made.gate is not None
    add_steep_gradients(
        *(q, b, written, None, log_decay, grad, (made.q, made.b, None, made.gate), steep, chunks),
        scale=scale,
        tiles=tiles,
        num_steps=steps,
        query_steps=steps,
    )
    if residual is not None:
        add_steep_gradients(
            *(b if a is None else a, b, written, rate, log_decay, residual),
            *((made.a, made.b, made.rate, made.gate), steep, chunks),
            scale=-1.0,
            tiles=tiles,
            num_steps=steps,
            reads_before=operands.reads_before_decay,
        )
    return made
