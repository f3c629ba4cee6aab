"""The recurrences that are checked, timed, tuned and verified: one row each, and every other list is made from these.

A row says how transition and write come from operands; the operands are random and drawn in one of two ways: in range,
for the checks (``catalogue``), or as for published timings (``statemix.benchmarks.ops``).

Shapes: B batch, T time, m writes a token, n delta updates a token, H key heads, HV value heads, K key_dim,
V value_dim, b blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from typing import Literal, Protocol

from torch import Tensor

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

from .delta_updates import DecayedChannelDelta, UndecayedChannelDelta, UndecayedDelta
from .problem import Sizes


@dataclass(frozen=True)
class Operands:
    """What any row may use. The axes m, n and b are there where they count more than one.

    Attributes:
        q: [B, T, H, K].
        k: of unit length, in blocks in each of them, [B, T, m, H, K].
        v: [B, T, m, HV, V].
        beta: [B, T, n, HV, b].
        fixed_decay: of each head, [HV].
        scalar_decay: [B, T, HV, b].
        channel_decay: [B, T, HV, K].
        direction: the key of a delta update where that is not k, [B, T, n, H, K].
        channel_rate: a beta for each channel, [B, T, HV, K].
        feedback: the share of a write that is erased, [B, T, HV].
        write: a rate of its own, [B, T, m, HV].
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
    write: Tensor

    @property
    def like_output(self) -> Tensor:
        """[B, T, HV, V], of the size and dtype of the output."""
        return self.v if self.v.ndim == 4 else self.v[:, :, 0]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Operands":
        """The same operands with ``change(x)`` for every tensor."""
        return Operands(*(change(x) for _, x in self.named()))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))


class Source(Protocol):
    """Where random operands come from. A shape begins with B and T; a unit key has unit length in each block."""

    def query(self, *shape: int, blocks: int) -> Tensor: ...
    def unit_key(self, *shape: int, blocks: int) -> Tensor: ...
    def value(self, *shape: int) -> Tensor: ...
    def rate(self, *shape: int) -> Tensor: ...
    def log_decay(self, *shape: int) -> Tensor: ...
    def fixed_decay(self, num_heads: int) -> Tensor: ...


Scan = tuple[Transition, Tensor | None]
BuildScan = Callable[[Operands], Scan]
Family = Literal["additive", "delta"]
Gate = Literal["none", "scalar", "channel"]


@dataclass(frozen=True)
class NamedRecurrence:
    """One recurrence.

    Attributes:
        name: that of its paper, as recipes know it, and what differs from it.
        kernels: the family of kernels that runs it; of no account without a label.
        build: transition and write out of the operands.
        uses: the operands besides q, k, v that it reads.
        label: for a table; empty for a row that is neither timed nor verified on a GPU.
        subject: its name among the subjects of the harness; empty for a row that is not checked there.
        count: n, delta updates a token.
        num_writes: m; None for n.
        blocks: b.
        max_beta: up to which no state can grow; operands as for published timings stay below 1.
        is_timed: a row of tables; the other combinations are only verified.
    """

    name: str
    kernels: Family
    build: BuildScan
    uses: tuple[str, ...] = ()
    label: str = ""
    subject: str = ""
    count: int = 1
    num_writes: int | None = None
    blocks: int = 1
    max_beta: float = 1.0
    is_timed: bool = True

    def inputs(self, operands: Operands) -> dict[str, Tensor]:
        """The operands that it reads, by name."""
        return {name: x for name, x in operands.named() if name in ("q", "k", "v", *self.uses)}

    def draw(self, sizes: Sizes, source: Source) -> Operands:
        """Random operands, those that it does not read too: a seed gives the same ones to every recurrence."""
        s, b = sizes, self.blocks
        by_block = (b,) if b > 1 else ()
        token, updates = (s.batch, s.seq_len), (s.batch, s.seq_len, *_axis(self.count))
        writes = (*token, *_axis(self.count if self.num_writes is None else self.num_writes))
        return Operands(
            q=source.query(*token, s.num_heads, s.key_dim, blocks=b),
            k=source.unit_key(*writes, s.num_heads, s.key_dim, blocks=b),
            v=source.value(*writes, s.num_value_heads, s.value_dim),
            beta=source.rate(*updates, s.num_value_heads, *by_block),
            fixed_decay=source.fixed_decay(s.num_value_heads),
            scalar_decay=source.log_decay(*token, s.num_value_heads, *by_block),
            channel_decay=source.log_decay(*token, s.num_value_heads, s.key_dim),
            direction=source.unit_key(*updates, s.num_heads, s.key_dim, blocks=b),
            channel_rate=source.rate(*token, s.num_value_heads, s.key_dim),
            feedback=source.rate(*token, s.num_value_heads),
            write=source.rate(*writes, s.num_value_heads),
        )

    def in_blocks(self, blocks: int) -> "NamedRecurrence":
        """A block-diagonal row with another number of blocks."""
        assert self.blocks > 1
        return replace(self, blocks=blocks, label=self.label.replace(f"{self.blocks} blocks", f"{blocks} blocks"))


def _axis(count: int) -> tuple[int, ...]:
    return (count,) if count > 1 else ()


# Name, label and subject of a gate with so many delta updates along the write key.
_ALONG_THE_KEY: dict[tuple[Gate, int], tuple[str, str, str]] = {
    ("none", 1): ("deltanet", "DeltaNet", "householder"),
    ("scalar", 1): ("gated_deltanet", "gated DeltaNet", "gated_householder"),
    ("channel", 1): ("kda", "KDA", "diagonal_gated_householder"),
    ("none", 2): ("deltaproduct", "DeltaProduct", ""),
    ("scalar", 2): ("gated_deltaproduct", "gated DeltaProduct", "gated_householder_count_2"),
    ("channel", 2): ("kda_product", "KDA, 2 steps", "diagonal_gated_householder_count_2"),
}
_BLOCK_SUBJECTS = {"deltanet_blocks": "block_diagonal", "kda_product_blocks": "block_diagonal_count_2"}
_ALSO_TIMED = ("deltanet_projected", "deltanet_blocks", "gated_deltanet_blocks", "kda_blocks")
_DECAY: dict[Gate, tuple[str, ...]] = {"none": (), "scalar": ("scalar_decay",), "channel": ("channel_decay",)}


def _delta(x: Operands, *, gate: Gate, is_projected: bool = False, has_blocks: bool = False) -> Scan:
    transition: Transition = Householder(x.direction if is_projected else x.k, x.beta)
    if gate != "none":
        left = ScalarGate(x.scalar_decay) if gate == "scalar" else DiagonalGate(x.channel_decay)
        transition = Product(left, transition)
    return (BlockDiagonal(transition, x.beta.shape[-1]) if has_blocks else transition), x.beta


def _delta_row(gate: Gate, *, count: int, is_projected: bool, blocks: int) -> NamedRecurrence:
    """A gate, n delta updates along the write key or another direction, whole or in blocks."""
    name, label, subject = _ALONG_THE_KEY[gate, count]
    has_blocks = blocks > 1
    full_name = name + ("_projected" if is_projected else "") + ("_blocks" if has_blocks else "")
    return NamedRecurrence(
        full_name,
        "delta",
        partial(_delta, gate=gate, is_projected=is_projected, has_blocks=has_blocks),
        ("beta", *_DECAY[gate], *(["direction"] if is_projected else [])),
        label + (", own direction" if is_projected else "") + (f", {blocks} blocks" if has_blocks else ""),
        _BLOCK_SUBJECTS.get(full_name, "" if is_projected or has_blocks else subject),
        count=count,
        blocks=blocks,
        max_beta=2.0,
        is_timed=not (is_projected or has_blocks) or full_name in _ALSO_TIMED,
    )


def _retnet(x: Operands) -> Scan:
    return FixedDecay(x.fixed_decay), None


def _gla(x: Operands) -> Scan:
    return DiagonalGate(x.channel_decay), None


def _gdn2(x: Operands) -> Scan:
    return DecayedChannelDelta(x.channel_decay, x.k, x.channel_rate), None


def _rwkv7(x: Operands) -> Scan:
    return UndecayedChannelDelta(x.channel_decay, x.direction, x.channel_rate), None


def _comba(x: Operands) -> Scan:
    return UndecayedDelta(x.scalar_decay, x.k, x.beta, x.feedback), x.beta


def _other_direction(x: Operands) -> Scan:
    return Householder(x.direction, x.beta), x.write


def _then_gate(x: Operands) -> Scan:
    return Product(Householder(x.k, x.beta), DiagonalGate(x.channel_decay)), x.beta


def _two_directions(x: Operands) -> Scan:
    return Product(Householder(x.direction, x.write), Householder(x.k, x.beta)), x.beta


def _gated_blocks(x: Operands) -> Scan:
    """Beta of a head is that of all its blocks."""
    return BlockDiagonal(Product(ScalarGate(x.scalar_decay), Householder(x.k, x.write)), 4), x.write


def _composed(
    name: str, build: BuildScan, *uses: str, count: int = 1, num_writes: int | None = None, blocks: int = 1
) -> NamedRecurrence:
    """What no paper has and a user may compose: a row for the harness alone."""
    return NamedRecurrence(name, "delta", build, uses, "", name, count, num_writes, blocks, 2.0, is_timed=False)


_Row = NamedRecurrence

RECURRENCES: dict[str, NamedRecurrence] = {
    row.name: row
    for row in (
        _Row("linear_attention", "additive", lambda x: (Identity(), None), (), "linear attention", "identity"),
        _Row("retnet", "additive", _retnet, ("fixed_decay",), "RetNet", "fixed_decay"),
        _Row("mamba2", "additive", lambda x: (ScalarGate(x.scalar_decay), None), ("scalar_decay",), "scalar gate"),
        _Row("gla", "additive", _gla, ("channel_decay",), "GLA", "diagonal_gate"),
        *(
            _delta_row(gate, count=count, is_projected=is_projected, blocks=blocks)
            for blocks, is_projected, count, gate in product((1, 2), (False, True), (1, 2), _DECAY)
        ),
        _Row("gdn2", "delta", _gdn2, ("channel_decay", "channel_rate"), "GDN-2"),
        _Row("rwkv7", "delta", _rwkv7, ("channel_decay", "direction", "channel_rate"), "RWKV-7"),
        _Row("comba", "delta", _comba, ("beta", "scalar_decay", "feedback"), "Comba"),
        _composed("scalar_gate", lambda x: (ScalarGate(x.scalar_decay), x.write), "scalar_decay", "write"),
        _composed("identity_two_writes", lambda x: (Identity(), x.write), "write", num_writes=2),
        _composed("householder_count_3", partial(_delta, gate="none"), "beta", count=3),
        _composed("householder_other_direction", _other_direction, "direction", "beta", "write"),
        _composed("two_erasures_one_write", _other_direction, "direction", "beta", "write", count=2, num_writes=1),
        _composed("householder_then_gate", _then_gate, "beta", "channel_decay"),
        _composed("two_directions", _two_directions, "direction", "beta", "write"),
        _composed("block_diagonal_gated", _gated_blocks, "scalar_decay", "write", blocks=4),
    )
}
