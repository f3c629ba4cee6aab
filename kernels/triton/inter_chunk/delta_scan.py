"""Launches the inter-chunk scan of the delta family."""

from typing import Any, NamedTuple

from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.spans import Spans, ceil_div, power_of_2_from
from statemix.kernels.triton.primitives.gates import SCALAR

from .delta_scan_kernel import _delta_walk_kernel


class DeltaWalkInputs(NamedTuple):
    """What the walk reads; names and shapes as in ``_delta_walk_kernel``.

    Attributes:
        decay, reads_before_decay, num_steps, scale: of the call.
    """

    query: Tensor
    eraser: Tensor
    key: Tensor
    value: Tensor
    pairs: Tensor
    rate: Tensor | None
    weight: Tensor | None
    gate: Tensor | None
    initial: Tensor | None
    decay: int
    reads_before_decay: bool
    num_steps: int
    scale: float

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """The compile-time parameters that the walk and the outputs made from its states share."""
        return {
            "HQ": self.query.shape[2],
            "HA": self.eraser.shape[2],
            "HO": self.value.shape[2],
            "HV": self.key.shape[2],
            "K": self.key.shape[-1],
            "V": self.value.shape[-1],
            "CHUNK": self.pairs.shape[-1],
            "BLOCK_K": max(16, power_of_2_from(self.key.shape[-1])),
            "BLOCK_V": tiles.block,
            "STEPS": self.num_steps,
            "DECAY": self.decay,
            "READS_BEFORE": self.reads_before_decay and self.decay == SCALAR.value,
            "PRECISION": products_in(self.key.dtype, device_arch(self.key.device)),
        }


def delta_walk(
    inputs: DeltaWalkInputs,
    spans: Spans,
    *,
    tiles: Tiles,
    final: Tensor | None,
    maps: Tensor | None = None,
    output: Tensor | None = None,
    states: Tensor | None = None,
    corrected: tuple[Tensor | None, Tensor] | None = None,
    reverse: bool = False,
) -> None:
    """Fill ``output`` (dR in reverse), ``states`` (each chunk starts from; in reverse those at its end) and ``final``.

    Args:
        maps: where P of every span goes; forward only, and from no initial state.
        corrected: T, and where U goes.
    """
    value_dim, chunk_size = inputs.value.shape[-1], inputs.pairs.shape[-1]
    heads, key_dim = inputs.key.shape[2:]
    has_output = output is not None
    inverse, corrected_rows = corrected if corrected is not None else (None, None)
    assert reverse or output is None or heads == inputs.value.shape[2], "outputs of blocks are added up elsewhere"
    blocks = ceil_div(value_dim, tiles.block) + (0 if maps is None else ceil_div(key_dim, tiles.block))
    launch(
        _delta_walk_kernel,
        (spans.count * heads * blocks,),
        (
            inputs.query if has_output or reverse else None,
            inputs.eraser,
            inputs.key,
            inputs.value,
            inputs.pairs if has_output or reverse else None,
            inputs.rate,
            inputs.weight,
            inputs.gate,
            inputs.initial,
            output,
            inverse,
            corrected_rows,
            states,
            final,
            maps,
            spans.table,
            inputs.scale,
            spans.seq_len,
            spans.per_sequence,
            ceil_div(spans.seq_len, chunk_size),
            spans.length,
            inputs.eraser.shape[0] * inputs.eraser.shape[1],
        ),
        {**inputs.constants(tiles), "REVERSE": reverse, "STAGES": tiles.num_stages},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
