"""The UT transform of every chunk: what is launched. Equations stand with ``ut_transform_kernels``."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.operands import Decay, ScanOperands
from statemix.kernels.spans import Spans
from statemix.kernels.triton.primitives.sizes import sizes, whole_block

from .channel_scores import ChannelScores
from .ut_transform_kernels import triangular_inverse_kernel, ut_transform_kernel


class UTTransform(NamedTuple):
    """A_qk L^-1 [chunks, HV, C, C], L^-T (b to_end) [B, T n, HV, K], and L^-1 [chunks, HV, C, C] or None."""

    scores: Tensor
    key: Tensor
    L_inv: Tensor | None


def ut_transform(
    operands: ScanOperands,
    channels: ChannelScores | None,
    gate: Tensor | None,
    chunks: Spans,
    *,
    scale: float,
    tiles: Tiles,
    max_registers: int | None,
    needs_L_inv: bool,
) -> UTTransform:
    """The products that the inter-chunk scan reads; micro-steps of no document stay unwritten.

    Args:
        channels: under a diagonal decay, the scores from ``channel_scores``.
        gate: under a scalar decay, ``cumulative_gate`` of the micro-steps.
        chunks: in micro-steps.
        tiles, max_registers: of the products.
    """
    q, heads = operands.q, operands.num_heads
    constants = sizes(operands, chunks)
    L_inv = _triangular_inverse(operands, channels, gate, chunks, constants)
    transform = UTTransform(
        q.new_empty(L_inv.shape),
        q.new_empty(*operands.b.shape[:2], heads, q.shape[-1]),
        q.new_empty(L_inv.shape) if needs_L_inv else None,
    )
    b = operands.b if channels is None else channels.b_to_end
    block_k = tiles.fitted_to(q.shape[-1])
    inputs = (q, b, gate, None) if channels is None else (None, b, None, channels.A_qk)
    launch(
        ut_transform_kernel,
        (chunks.count * heads,),
        (*inputs, L_inv, *transform, *chunks.place(scale), b.shape[0] * b.shape[1]),
        {**constants, "HB": b.shape[2], "BLOCK_K": block_k, "READS_BEFORE": _has_inner_decay(operands)},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        max_registers=max_registers,
    )
    return transform


def _triangular_inverse(
    operands: ScanOperands,
    channels: ChannelScores | None,
    gate: Tensor | None,
    chunks: Spans,
    constants: dict[str, Any],
) -> Tensor:
    """L^-1 of every chunk, [chunks, HV, C, C] float32, without a scalar decay that can wait."""
    b, size, arch = operands.b, chunks.length, device_arch(operands.q.device)
    assert size in (16, 32, 64), size
    a, decay, is_wide = b if operands.a is None else operands.a, Decay.NONE, b.dtype == torch.float32
    inputs: tuple[Tensor | None, ...] = (a, b, operands.erase_beta, None, None)
    if channels is not None:
        inputs, decay = (None, None, None, None, channels.A_kk), Decay.DIAGONAL
        a = b = channels.b_to_end  # for its heads
    elif _has_inner_decay(operands):
        inputs, decay = (a, b, operands.erase_beta, gate, None), Decay.SCALAR
    L_inv = b.new_empty(chunks.count, operands.num_heads, size, size, dtype=torch.float32)
    precision = exact = "ieee"
    if not is_wide:
        precision, exact = products_in(b.dtype, arch), products_in(torch.float32, arch)
        if decay is Decay.NONE and arch.startswith("sm_"):
            exact = "float16x3"
    # one warp holds whole vectors of a usual head; float32 ones are twice as wide
    block_k = whole_block(min(b.shape[-1], 32 if is_wide else 128))
    heads = {"HA": a.shape[2], "HB": b.shape[2]}
    settings = {"BLOCK_K": block_k, "DECAY": decay.value, "PRECISION": precision, "EXACT": exact}
    place = (chunks.table, chunks.seq_len, chunks.per_sequence, b.shape[0] * b.shape[1])
    grid = (chunks.count * operands.num_heads,)
    launch(
        triangular_inverse_kernel,
        grid,
        (*inputs, L_inv, *place),
        {**constants, **heads, **settings},
        num_warps=1,
        num_stages=1,
    )
    return L_inv


def _has_inner_decay(operands: ScanOperands) -> bool:
    """Micro-steps that read before a scalar decay of their own, so that A_kk needs it."""
    return operands.reads_before_decay and operands.decay is Decay.SCALAR
