"""The inter-chunk scan of the delta family: what is launched. Equations stand with ``delta_scan_kernel``."""

from typing import Any, NamedTuple

from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.operands import Decay
from statemix.kernels.spans import Spans, ceil_div
from statemix.kernels.triton.primitives.sizes import whole_block

from .delta_scan_kernel import delta_scan_kernel


class DeltaScanInputs(NamedTuple):
    """What the scan reads; names and shapes as in ``delta_scan_kernel``.

    Attributes:
        decay, reads_before_decay, num_steps, scale: of the call.
    """

    query: Tensor
    erase: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor
    erase_beta: Tensor | None
    write: Tensor | None
    gate: Tensor | None
    initial: Tensor | None
    decay: int
    reads_before_decay: bool
    num_steps: int
    scale: float

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """The compile-time parameters that the scan and the outputs made from its states share."""
        return {
            "HQ": self.query.shape[2],
            "HA": self.erase.shape[2],
            "HO": self.value.shape[2],
            "HV": self.key.shape[2],
            "K": self.key.shape[-1],
            "V": self.value.shape[-1],
            "CHUNK": self.scores.shape[-1],
            "BLOCK_K": whole_block(self.key.shape[-1]),
            "BLOCK_V": tiles.block,
            "SUB_STEPS": self.num_steps,
            "DECAY": self.decay,
            "READS_BEFORE": self.reads_before_decay and self.decay == Decay.SCALAR,
            "PRECISION": products_in(self.key.dtype, device_arch(self.key.device)),
        }


def inter_chunk_scan(
    inputs: DeltaScanInputs,
    spans: Spans,
    *,
    tiles: Tiles,
    final: Tensor | None,
    maps: Tensor | None = None,
    output: Tensor | None = None,
    states: Tensor | None = None,
    pseudo_values: tuple[Tensor | None, Tensor] | None = None,
    reverse: bool = False,
) -> None:
    """Fill ``output`` (dR in reverse), ``states`` (each chunk starts from; in reverse those at its end) and ``final``.

    Args:
        maps: where P of every span goes; forward only, and from no initial state.
        pseudo_values: L^-1, and where U goes.
    """
    value_dim, (*_, heads, key_dim) = inputs.value.shape[-1], inputs.key.shape
    query, erase, key, value, scores, erase_beta, write, gate, initial, *_ = inputs
    L_inv, u = (None, None) if pseudo_values is None else pseudo_values
    reads = (query, scores) if output is not None or reverse else (None, None)
    assert reverse or output is None or heads == value.shape[2], "outputs of blocks are added up elsewhere"
    blocks = ceil_div(value_dim, tiles.block) + (0 if maps is None else ceil_div(key_dim, tiles.block))
    launch(
        delta_scan_kernel,
        (spans.count * heads * blocks,),
        (
            *(reads[0], erase, key, value, reads[1], erase_beta, write, gate, initial),
            *(output, L_inv, u, states, final, maps, *spans.place(inputs.scale)),
            *(ceil_div(spans.seq_len, scores.shape[-1]), spans.length, erase.shape[0] * erase.shape[1]),
        ),
        {**inputs.constants(tiles), "REVERSE": reverse, "STAGES": tiles.num_stages},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
