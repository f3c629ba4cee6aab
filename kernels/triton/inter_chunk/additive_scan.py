"""Launches the inter-chunk scan of the additive family."""

from dataclasses import dataclass

from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.spans import Spans, ceil_div, power_of_2_from

from .additive_scan_kernel import _walk_kernel


@dataclass(frozen=True)
class WalkInputs:
    """What the walk reads; names and shapes as in ``_walk_kernel``."""

    reader: Tensor
    writer: Tensor
    value: Tensor
    gate: Tensor | None
    pairs: Tensor | None
    initial: Tensor | None
    decay: int
    scale: float


def walk(
    inputs: WalkInputs,
    spans: Spans,
    *,
    chunk_size: int,
    tiles: Tiles,
    output: Tensor | None,
    states: Tensor | None,
    final: Tensor | None,
    span_decay: Tensor | None = None,
    reverse: bool = False,
) -> None:
    """Fill ``output``, ``states`` and ``final`` (and the decay across each span) from ``inputs``."""
    key_dim, (heads, value_dim) = inputs.writer.shape[-1], inputs.value.shape[-2:]
    block_v = tiles.block
    launch(
        _walk_kernel,
        (spans.count * heads * ceil_div(value_dim, block_v),),
        (
            inputs.reader if output is not None else None,
            inputs.writer,
            inputs.value,
            inputs.gate,
            inputs.pairs if output is not None else None,
            inputs.initial,
            output,
            states,
            final,
            span_decay,
            spans.table,
            inputs.scale,
            spans.seq_len,
            spans.per_sequence,
            ceil_div(spans.seq_len, chunk_size),
            spans.length,
            inputs.value.shape[0] * inputs.value.shape[1],
        ),
        {
            "HR": inputs.reader.shape[-2],
            "HW": inputs.writer.shape[-2],
            "HV": heads,
            "K": key_dim,
            "V": value_dim,
            "CHUNK": chunk_size,
            "BLOCK_K": max(16, power_of_2_from(key_dim)),
            "BLOCK_V": block_v,
            "DECAY": inputs.decay,
            "REVERSE": reverse,
            "PRECISION": products_in(inputs.value.dtype, device_arch(inputs.value.device)),
            "STAGES": tiles.num_stages,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
