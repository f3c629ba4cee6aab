"""The compile-time sizes that most kernels share."""

from typing import Any

from statemix.kernels.launch_config import Tiles, device_arch, products_in
from statemix.kernels.operands import ScanOperands
from statemix.kernels.spans import Spans, power_of_2_from


def sizes(operands: ScanOperands, chunks: Spans) -> dict[str, Any]:
    """By the names of parameters; ``launch`` passes a kernel those that it has."""
    q, a, b, v = operands[:4]
    (_, _, query_heads, key_dim), key_heads, (_, _, value_heads, value_dim) = q.shape, b.shape[2], v.shape
    return {
        "HQ": query_heads,
        "HA": key_heads if a is None else a.shape[2],
        "HB": key_heads,
        "HO": value_heads,
        "HV": value_heads * operands.blocks,
        "K": key_dim,
        "V": value_dim,
        "CHUNK": chunks.length,
        "SUB_STEPS": operands.num_steps,
        "DECAY": operands.decay.value,
        "READS_BEFORE": operands.reads_before_decay,
        "PRECISION": products_in(q.dtype, device_arch(q.device)),
    }


def wide_block(tiles: Tiles, width: int) -> int:
    """The block of ``tiles``, or two of them where a head of ``width`` channels has as many."""
    return min(2 * tiles.block, max(tiles.block, power_of_2_from(width)))


def whole_block(width: int) -> int:
    """A block of all ``width`` channels of a head, as narrow as a matrix unit takes."""
    return max(16, power_of_2_from(width))
