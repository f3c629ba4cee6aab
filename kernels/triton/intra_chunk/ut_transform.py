"""Launches the UT transform."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans, power_of_2_from
from statemix.kernels.triton.primitives.gates import DIAGONAL, NO_DECAY, SCALAR, decay_kind

from .channel_scores import ChannelErasures
from .ut_transform_kernels import _inverse_kernel, _products_kernel


class InverseProducts(NamedTuple):
    """Q [chunks, HV, C, C], W [B, R, HV, K] and T [chunks, HV, C, C] or None."""

    pairs: Tensor
    key: Tensor
    inverse: Tensor | None


def inverse_products(
    operands: ScanOperands,
    channels: ChannelErasures | None,
    gate: Tensor | None,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    max_registers: int | None,
    needs_inverse: bool,
) -> InverseProducts:
    """Products of every chunk; rows of no document stay unwritten.

    Args:
        channels: under a diagonal decay, what ``channel_erasures`` made.
        gate: under a scalar decay, ``cumulative_gate`` of the rows.
        chunks: in rows.
        tiles, max_registers: of the products.
    """
    inverse = _launch_inverse(operands, channels, gate, chunks)
    made = InverseProducts(
        operands.q.new_empty(inverse.shape),
        operands.q.new_empty(*operands.b.shape[:2], operands.num_heads, operands.q.shape[-1]),
        operands.q.new_empty(inverse.shape) if needs_inverse else None,
    )
    b = operands.b if channels is None else channels.rest
    given = (operands.q, b, gate, None) if channels is None else (None, b, None, channels.pairs)
    launch(
        _products_kernel,
        (chunks.count * operands.num_heads,),
        (
            *(*given, inverse, *made),
            chunks.table,
            scale,
            chunks.seq_len,
            chunks.per_sequence,
            b.shape[0] * b.shape[1],
        ),
        {
            **_sizes(operands, chunks),
            "HQ": operands.q.shape[2],
            "HB": b.shape[2],
            "BLOCK_K": tiles.fitted_to(operands.q.shape[-1]),
            "STEPS": operands.num_steps,
            "DECAY": decay_kind(operands.log_decay),
            "READS_BEFORE": _has_inner_decay(operands),
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        max_registers=max_registers,
    )
    return made


def _launch_inverse(
    operands: ScanOperands, channels: ChannelErasures | None, gate: Tensor | None, chunks: Spans
) -> Tensor:
    """T of every chunk, [chunks, HV, C, C] float32, without a scalar decay that can wait."""
    b, size, arch = operands.b, chunks.length, device_arch(operands.q.device)
    assert size in (16, 32, 64), size
    a, rate, decay = b if operands.a is None else operands.a, operands.erase_beta, NO_DECAY.value
    is_wide = b.dtype == torch.float32
    given: tuple[Tensor | None, ...] = (a, b, rate, None, None)
    if channels is not None:
        given, decay = (None, None, None, None, channels.erasures), DIAGONAL.value
        a = b = channels.rest  # for its heads
    elif _has_inner_decay(operands):
        given, decay = (a, b, rate, gate, None), SCALAR.value
    inverse = b.new_empty(chunks.count, operands.num_heads, size, size, dtype=torch.float32)
    if is_wide:
        precision = exact = "ieee"
    else:
        precision, exact = products_in(b.dtype, arch), products_in(torch.float32, arch)
        if decay == NO_DECAY.value and arch.startswith("sm_"):
            exact = "float16x3"
    launch(
        _inverse_kernel,
        (chunks.count * inverse.shape[1],),
        (*given, inverse, chunks.table, chunks.seq_len, chunks.per_sequence, b.shape[0] * b.shape[1]),
        {
            **_sizes(operands, chunks),
            "HA": a.shape[2],
            "HB": b.shape[2],
            # one warp holds whole rows of a usual head; float32 ones are twice as wide
            "BLOCK_K": max(16, power_of_2_from(min(b.shape[-1], 32 if is_wide else 128))),
            "DECAY": decay,
            "PRECISION": precision,  # in place of that of the sizes
            "EXACT": exact,
        },
        num_warps=1,
        num_stages=1,
    )
    return inverse


def _has_inner_decay(operands: ScanOperands) -> bool:
    """Rows read before a scalar decay of their own, so that A needs it."""
    return operands.reads_before_decay and decay_kind(operands.log_decay) == SCALAR.value


def _sizes(operands: ScanOperands, chunks: Spans) -> dict[str, Any]:
    q = operands.q
    return {
        "HV": operands.num_heads,
        "K": q.shape[-1],
        "CHUNK": chunks.length,
        "PRECISION": products_in(q.dtype, device_arch(q.device)),
    }
