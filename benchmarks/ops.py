"""The recurrences that are timed, tuned and verified, by the names of their papers, and the operands they run on.

Random operands have the distribution that published timings of flash-linear-attention were taken with: unit queries and
keys, normal values, rates in (0, 1), log decays log sigmoid(x + 3) of normal x, mean about -0.05.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from statemix import harness
from statemix.harness.recurrences import RECURRENCES, Family, NamedRecurrence, Operands, Source


class Sizes(harness.Sizes):
    """Sizes of a call, printed for a table; ``num_value_heads`` is a multiple of ``num_heads``."""

    def __str__(self) -> str:
        heads = f"H{self.num_heads}"
        if self.num_value_heads != self.num_heads:
            heads += f" HV{self.num_value_heads}"
        width = f"D{self.key_dim}" if self.key_dim == self.value_dim else f"K{self.key_dim} V{self.value_dim}"
        return f"B{self.batch} T{self.seq_len} {heads} {width}"


# What is timed: the shape of most papers, few heads over a long sequence, wide heads, narrow ones, many, and between.
SHAPES = tuple(
    Sizes(batch, seq_len, heads, heads, dim, dim)
    for batch, seq_len, heads, dim in (
        (8, 2048, 16, 128),
        (1, 32768, 16, 128),
        (4, 4096, 8, 256),
        (8, 1024, 8, 64),
        (1, 8192, 96, 128),
        (2, 16384, 16, 128),
    )
)


OPS: dict[str, NamedRecurrence] = {op.name: op for op in RECURRENCES.values() if op.label}


class _AsPublished(Source):
    """Log decays in float32 (float64 beside float64), the others in ``dtype``."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype, self.device = dtype, device
        self.gate_dtype = torch.promote_types(dtype, torch.float32)
        self.generator = torch.Generator(device).manual_seed(seed)

    def value(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def query(self, *shape: int, blocks: int) -> Tensor:
        return self.unit_key(*shape, blocks=blocks)

    def unit_key(self, *shape: int, blocks: int) -> Tensor:
        x = self.value(*shape).to(self.gate_dtype).unflatten(-1, (blocks, -1))
        return normalize(x, dim=-1).flatten(-2).to(self.dtype)

    def rate(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=self.dtype, device=self.device)

    def log_decay(self, *shape: int) -> Tensor:
        return logsigmoid(torch.randn(shape, generator=self.generator, dtype=self.gate_dtype, device=self.device) + 3)

    def fixed_decay(self, num_heads: int) -> Tensor:
        """log(1 - 2^(-5 - h)) of head h, as in RetNet."""
        return torch.log1p(-(2.0 ** (-5 - torch.arange(num_heads, dtype=self.gate_dtype, device=self.device))))


def random_operands(
    op: NamedRecurrence, sizes: Sizes, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Operands:
    """Operands of a recurrence, with its counts and blocks.

    Raises:
        ValueError: its blocks do not divide key_dim.
    """
    if sizes.key_dim % op.blocks:
        raise ValueError(f"key_dim: expected a multiple of the {op.blocks} blocks, got {sizes.key_dim}")
    return op.draw(sizes, _AsPublished(dtype, device, seed))


def find_ops(names: list[str] | tuple[str, ...]) -> list[NamedRecurrence]:
    """The recurrences of these names.

    Raises:
        ValueError: an unknown name.
    """
    for name in names:
        if name not in OPS:
            raise ValueError(f"op: expected one of {', '.join(OPS)}, got {name!r}")
    return [OPS[name] for name in names]


def names_of(family: Family | Literal["all"], *, timed_only: bool = True) -> list[str]:
    """The names of those that a family of kernels runs."""
    found = [op for op in OPS.values() if family in (op.kernels, "all")]
    return [op.name for op in found if op.is_timed or not timed_only]
