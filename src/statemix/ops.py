"""The recurrences that are timed, tuned and verified, by the names of their papers: one row each.

Random operands have the distribution that published timings of flash-linear-attention were taken with: unit queries and
keys, normal values, rates in (0, 1), log decays log sigmoid(x + 3) of normal x, mean about -0.05.

Shapes: B batch, T time, n steps a token, H key heads, HV value heads, K key_dim, V value_dim, b blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from statemix.transitions import (
    BlockDiagonal,
    DiagonalGate,
    FixedDecay,
    Householder,
    Identity,
    Product,
    ScalarGate,
    Transition,
)

from .erasures import DecayedChannelErasure, UndecayedChannelErasure, UndecayedErasure


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
    """What any row may use. The axis n is there where a token takes several steps, the axis b where there are blocks.

    Attributes:
        q: [B, T, H, K], of unit length, in blocks in each of them.
        k: the same, [B, T, n, H, K].
        v: [B, T, n, HV, V].
        beta: [B, T, n, HV, b].
        fixed_decay: log(1 - 2^(-5 - h)) of head h, [HV] float32, as in RetNet.
        scalar_decay: [B, T, HV, b] float32.
        channel_decay: [B, T, HV, K] float32.
        direction: what is erased where it is not k, as k.
        channel_rate: a rate for each channel, [B, T, HV, K].
        feedback: the share of a write that is erased, [B, T, HV].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    fixed_decay: Tensor
    scalar_decay: Tensor
    channel_decay: Tensor
    direction: Tensor
    channel_rate: Tensor
    feedback: Tensor

    @property
    def like_output(self) -> Tensor:
        """[B, T, HV, V], of the size and dtype of the output."""
        return self.v if self.v.ndim == 4 else self.v[:, :, 0]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Operands":
        """The same operands with ``change(x)`` for every tensor."""
        return Operands(*(change(x) for _, x in self.named()))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))


Make = Callable[[Operands], tuple[Transition, Tensor | None]]
Family = Literal["additive", "delta"]


@dataclass(frozen=True)
class Op:
    """One recurrence.

    Attributes:
        name: that of its paper, as recipes know it, and what differs from it.
        label: for a table.
        kernels: the family of kernels that runs it.
        make: transition and write out of the operands.
        uses: the operands besides q, k, v that it reads.
        count: n, steps a token.
        blocks: b.
        max_beta: up to which no state can grow; random operands stay below 1.
        is_timed: a row of tables; the other combinations are only verified.
    """

    name: str
    label: str
    kernels: Family
    make: Make
    uses: tuple[str, ...]
    count: int = 1
    blocks: int = 1
    max_beta: float = 1.0
    is_timed: bool = True

    def inputs(self, operands: Operands) -> dict[str, Tensor]:
        """The operands that it reads, by name."""
        return {name: x for name, x in operands.named() if name in ("q", "k", "v", *self.uses)}

    def operands(self, sizes: Sizes, *, dtype: torch.dtype, device: torch.device) -> Operands:
        """Random operands with its steps and blocks."""
        return random_operands(sizes, dtype=dtype, device=device, count=self.count, blocks=self.blocks)

    def in_blocks(self, blocks: int) -> "Op":
        """A block-diagonal row with another number of blocks."""
        assert self.blocks > 1
        return replace(self, blocks=blocks, label=self.label.replace(f"{self.blocks} blocks", f"{blocks} blocks"))


Gate = Literal["none", "scalar", "channel"]

# Name and label of a gate with so many Householder steps along the write key.
_ALONG_THE_KEY: dict[tuple[Gate, int], tuple[str, str]] = {
    ("none", 1): ("deltanet", "DeltaNet"),
    ("scalar", 1): ("gated_deltanet", "gated DeltaNet"),
    ("channel", 1): ("kda", "KDA"),
    ("none", 2): ("deltaproduct", "DeltaProduct"),
    ("scalar", 2): ("gated_deltaproduct", "gated DeltaProduct"),
    ("channel", 2): ("kda_product", "KDA, 2 steps"),
}
_ALSO_TIMED = ("deltanet_projected", "deltanet_blocks", "gated_deltanet_blocks", "kda_blocks")


def _householder(x: Operands, *, gate: Gate, is_projected: bool, has_blocks: bool) -> tuple[Transition, Tensor]:
    made: Transition = Householder(x.direction if is_projected else x.k, x.beta)
    if gate != "none":
        left = ScalarGate(x.scalar_decay) if gate == "scalar" else DiagonalGate(x.channel_decay)
        made = Product(left, made)
    return (BlockDiagonal(made, x.beta.shape[-1]) if has_blocks else made), x.beta


def _householder_op(gate: Gate, *, count: int, is_projected: bool, blocks: int) -> Op:
    """A gate, n steps along the write key or another direction, whole or in blocks."""
    name, label = _ALONG_THE_KEY[gate, count]
    has_blocks = blocks > 1
    decay: dict[Gate, tuple[str, ...]] = {"none": (), "scalar": ("scalar_decay",), "channel": ("channel_decay",)}
    full_name = name + ("_projected" if is_projected else "") + ("_blocks" if has_blocks else "")
    return Op(
        full_name,
        label + (", own direction" if is_projected else "") + (f", {blocks} blocks" if has_blocks else ""),
        "delta",
        partial(_householder, gate=gate, is_projected=is_projected, has_blocks=has_blocks),
        ("beta", *decay[gate], *(["direction"] if is_projected else [])),
        count=count,
        blocks=blocks,
        max_beta=2.0,
        is_timed=not (is_projected or has_blocks) or full_name in _ALSO_TIMED,
    )


_GATES: tuple[Gate, ...] = ("none", "scalar", "channel")

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("linear_attention", "linear attention", "additive", lambda x: (Identity(), None), ()),
        Op("retnet", "RetNet", "additive", lambda x: (FixedDecay(x.fixed_decay), None), ("fixed_decay",)),
        Op("mamba2", "scalar gate", "additive", lambda x: (ScalarGate(x.scalar_decay), None), ("scalar_decay",)),
        Op("gla", "GLA", "additive", lambda x: (DiagonalGate(x.channel_decay), None), ("channel_decay",)),
        *(
            _householder_op(gate, count=count, is_projected=is_projected, blocks=blocks)
            for blocks, is_projected, count, gate in product((1, 2), (False, True), (1, 2), _GATES)
        ),
        Op(
            "gdn2",
            "GDN-2",
            "delta",
            lambda x: (DecayedChannelErasure(x.channel_decay, x.k, x.channel_rate), None),
            ("channel_decay", "channel_rate"),
        ),
        Op(
            "rwkv7",
            "RWKV-7",
            "delta",
            lambda x: (UndecayedChannelErasure(x.channel_decay, x.direction, x.channel_rate), None),
            ("channel_decay", "direction", "channel_rate"),
        ),
        Op(
            "comba",
            "Comba",
            "delta",
            lambda x: (UndecayedErasure(x.scalar_decay, x.k, x.beta, x.feedback), x.beta),
            ("beta", "scalar_decay", "feedback"),
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


def names_of(family: Family | Literal["all"], *, timed_only: bool = True) -> list[str]:
    """The rows that a family of kernels runs."""
    rows = [op for op in OPS.values() if family in (op.kernels, "all")]
    return [op.name for op in rows if op.is_timed or not timed_only]


def random_operands(
    sizes: Sizes, *, dtype: torch.dtype, device: torch.device, seed: int = 0, count: int = 1, blocks: int = 1
) -> Operands:
    """Operands of these sizes: log decays in float32 (float64 beside float64), the others in ``dtype``.

    Args:
        count: n, steps a token; for 1 there is no axis n.
        blocks: b, whose keys have unit length each; for 1 there is no axis b.

    Raises:
        ValueError: ``blocks`` does not divide key_dim.
    """
    if sizes.key_dim % blocks:
        raise ValueError(f"key_dim: expected a multiple of the {blocks} blocks, got {sizes.key_dim}")
    generator = torch.Generator(device).manual_seed(seed)
    tokens, s = (sizes.batch, sizes.seq_len), sizes
    steps, by_block = (count,) if count > 1 else (), (blocks,) if blocks > 1 else ()
    gate_dtype = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(*tokens, *shape, generator=generator, dtype=like, device=device)

    def rates(*shape: int) -> Tensor:
        return torch.rand(*tokens, *shape, generator=generator, dtype=dtype, device=device)

    def unit(x: Tensor) -> Tensor:
        return normalize(x.to(gate_dtype).unflatten(-1, (blocks, -1)), dim=-1).flatten(-2).to(dtype)

    q, k = normal(s.num_heads, s.key_dim), normal(*steps, s.num_heads, s.key_dim)
    v = normal(*steps, s.num_value_heads, s.value_dim)
    beta = rates(*steps, s.num_value_heads, *by_block)
    scalar = logsigmoid(normal(s.num_value_heads, *by_block, like=gate_dtype) + 3)
    channels = logsigmoid(normal(s.num_value_heads, s.key_dim, like=gate_dtype) + 3)
    head = torch.arange(s.num_value_heads, dtype=gate_dtype, device=device)
    return Operands(
        q=unit(q),
        k=unit(k),
        v=v,
        beta=beta,
        fixed_decay=torch.log1p(-(2.0 ** (-5 - head))),
        scalar_decay=scalar,
        channel_decay=channels,
        direction=unit(normal(*steps, s.num_heads, s.key_dim)),
        channel_rate=rates(s.num_value_heads, s.key_dim),
        feedback=rates(s.num_value_heads),
    )
