"""The inter-chunk scan of the additive family: what is launched. Equations stand with ``additive_scan_kernel``."""

from dataclasses import dataclass

from torch import Tensor

from statemix.kernels.launch import launch
from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.spans import Spans, ceil_div
from statemix.kernels.triton.primitives.sizes import whole_block

from .additive_scan_kernel import additive_scan_kernel


@dataclass(frozen=True)
class AdditiveScanInputs:
    """What the scan reads; names and shapes as in ``additive_scan_kernel``."""

    reader: Tensor
    writer: Tensor
    value: Tensor
    gate: Tensor | None
    A_qk: Tensor | None
    initial: Tensor | None
    decay: int
    scale: float


def inter_chunk_scan(
    inputs: AdditiveScanInputs,
    spans: Spans,
    *,
    chunk_size: int,
    tiles: Tiles,
    output: Tensor | None = None,
    states: Tensor | None = None,
    final: Tensor | None = None,
    span_decay: Tensor | None = None,
    reverse: bool = False,
) -> None:
    """Fill ``output``, ``states`` and ``final`` (and the decay across each span) from ``inputs``."""
    reader, writer, value = inputs.reader, inputs.writer, inputs.value
    key_dim, (batch, seq_len, heads, value_dim) = writer.shape[-1], value.shape
    reads = (reader, inputs.A_qk) if output is not None else (None, None)
    constants = {
        "HR": reader.shape[-2],
        "HW": writer.shape[-2],
        "HV": heads,
        "K": key_dim,
        "V": value_dim,
        "CHUNK": chunk_size,
        "BLOCK_K": whole_block(key_dim),
        "BLOCK_V": tiles.block,
        "DECAY": inputs.decay,
        "REVERSE": reverse,
        "PRECISION": products_in(value.dtype, device_arch(value.device)),
        "STAGES": tiles.num_stages,
    }
    launch(
        additive_scan_kernel,
        (spans.count * heads * ceil_div(value_dim, tiles.block),),
        (
            *(reads[0], writer, value, inputs.gate, reads[1], inputs.initial, output, states, final, span_decay),
            *(*spans.place(inputs.scale), ceil_div(spans.seq_len, chunk_size), spans.length, batch * seq_len),
        ),
        constants,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
