"""The recurrences that are timed, tuned and verified, by the names of their papers: one row each.

Random operands have the distribution that published timings of flash-linear-attention were taken with: unit queries and
keys, normal values, rates in (0, 1), log decays log sigmoid(x + 3) of normal x, mean about -0.05.

Shapes: B batch, T time, H key heads, HV value heads, K key_dim, V value_dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from statemix.transitions import DiagonalGate, FixedDecay, Householder, Identity, Product, ScalarGate, Transition


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; ``num_value_heads`` is a multiple of ``num_heads``."""

    batch: int
    seq_len: int
    num_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

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


@dataclass(frozen=True)
class Operands:
    """What any row may use.

    Attributes:
        q, k: [B, T, H, K], unit length.
        v: [B, T, HV, V].
        beta: [B, T, HV].
        fixed_decay: log(1 - 2^(-5 - h)) of head h, [HV] float32, as in RetNet.
        scalar_decay: [B, T, HV] float32.
        channel_decay: [B, T, HV, K] float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    fixed_decay: Tensor
    scalar_decay: Tensor
    channel_decay: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> "Operands":
        """The same operands with ``change(x)`` for every tensor."""
        return Operands(*(change(x) for _, x in self.named()))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))


@dataclass(frozen=True)
class Op:
    """One recurrence.

    Attributes:
        name: that of its paper, as recipes know it.
        label: for a table.
        kernels: the family of kernels that runs it.
        make: transition and write out of the operands.
        uses: the operands besides q, k, v that it reads.
    """

    name: str
    label: str
    kernels: Literal["additive", "delta"]
    make: Callable[[Operands], tuple[Transition, Tensor | None]]
    uses: tuple[str, ...]

    def inputs(self, operands: Operands) -> dict[str, Tensor]:
        """The operands that it reads, by name."""
        return {name: x for name, x in operands.named() if name in ("q", "k", "v", *self.uses)}


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("linear_attention", "linear attention", "additive", lambda x: (Identity(), None), ()),
        Op("retnet", "RetNet", "additive", lambda x: (FixedDecay(x.fixed_decay), None), ("fixed_decay",)),
        Op("mamba2", "scalar gate", "additive", lambda x: (ScalarGate(x.scalar_decay), None), ("scalar_decay",)),
        Op("gla", "GLA", "additive", lambda x: (DiagonalGate(x.channel_decay), None), ("channel_decay",)),
        Op("deltanet", "DeltaNet", "delta", lambda x: (Householder(x.k, x.beta), x.beta), ("beta",)),
        Op(
            "gated_deltanet",
            "gated DeltaNet",
            "delta",
            lambda x: (Product(ScalarGate(x.scalar_decay), Householder(x.k, x.beta)), x.beta),
            ("beta", "scalar_decay"),
        ),
        Op(
            "kda",
            "KDA",
            "delta",
            lambda x: (Product(DiagonalGate(x.channel_decay), Householder(x.k, x.beta)), x.beta),
            ("beta", "channel_decay"),
        ),
    )
}


def find_ops(names: list[str] | tuple[str, ...]) -> list[Op]:
    """The rows of these names.

    Raises:
        ValueError: an unknown name.
    """
    for name in names:
        if name not in OPS:
            raise ValueError(f"op: expected one of {', '.join(OPS)}, got {name!r}")
    return [OPS[name] for name in names]


def random_operands(sizes: Sizes, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Operands:
    """Operands of these sizes: q, k, v and beta in ``dtype``, log decays in float32 (float64 beside float64)."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens, s = (sizes.batch, sizes.seq_len), sizes
    gate_dtype = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(*tokens, *shape, generator=generator, dtype=like, device=device)

    q, k = normal(s.num_heads, s.key_dim), normal(s.num_heads, s.key_dim)
    v = normal(s.num_value_heads, s.value_dim)
    q, k = (normalize(x.to(gate_dtype), dim=-1).to(dtype) for x in (q, k))
    beta = torch.rand(*tokens, s.num_value_heads, generator=generator, dtype=dtype, device=device)
    scalar = logsigmoid(normal(s.num_value_heads, like=gate_dtype) + 3)
    channels = logsigmoid(normal(s.num_value_heads, s.key_dim, like=gate_dtype) + 3)
    head = torch.arange(s.num_value_heads, dtype=gate_dtype, device=device)
    return Operands(q, k, v, beta, torch.log1p(-(2.0 ** (-5 - head))), scalar, channels)
