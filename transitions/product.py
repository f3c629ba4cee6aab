"""Products of transitions: M = A B, where A acts on the state first. Gated DeltaNet is ScalarGate @ Householder.

A decay lowers beside an erasure as long as it comes first, or directly after a single one:

    D (I - a b^T)      decay, then erase
    (I - a b^T) D  =   S D - (S a)(D b)^T: erase what the undecayed state holds (``reads_before_decay``)

Source: arXiv:2412.06464 section 3 (gated delta rule).
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from statemix.kernels import NormalForm, expand_heads
from statemix.kernels.normal_form import repeat_to, with_last_axis, with_steps

from .base import Transition
from .diagonal_gate import DiagonalGate
from .householder import Householder
from .modules.module import FactorConfig, HeadSizes, TransitionModule
from .modules.registry import TRANSITIONS


class Product(Transition, is_composition=True):
    """M_t = A_t B_t. ``A @ B`` is the short form; compiled code calls the class, which the compiler can trace.

    Attributes:
        left: A, acts first.
        right: B.
    """

    left: Transition
    right: Transition

    @property
    def is_diagonal(self) -> bool:  # type: ignore[override]
        return self.left.is_diagonal and self.right.is_diagonal

    @property
    def lowers_blocks(self) -> bool:  # type: ignore[override]
        return self.left.lowers_blocks and self.right.lowers_blocks

    @property
    def num_blocks(self) -> int:
        return max(self.left.num_blocks, self.right.num_blocks)

    @property
    def write_key(self) -> Tensor | None:
        left, right = self.left.write_key, self.right.write_key
        return left if right is None else right

    @property
    def natural_write(self) -> Tensor | None:
        left, right = self.left.natural_write, self.right.natural_write
        return left if right is None else right

    @property
    def eigenvalue_range(self) -> tuple[float, float] | None:
        """Real where one factor is a gate: Diag(a) X is similar to the symmetric Diag(a)^1/2 X Diag(a)^1/2."""
        ranges = self.left.eigenvalue_range, self.right.eigenvalue_range
        if ranges[0] is None or ranges[1] is None or not (self.left.is_diagonal or self.right.is_diagonal):
            return None
        ends = [x * y for x in ranges[0] for y in ranges[1]]
        return min(ends), max(ends)

    @property
    def spectral_radius(self) -> float | None:
        """Factors of the package have norm <= their radius, so the radii multiply."""
        radii = self.left.spectral_radius, self.right.spectral_radius
        return None if radii[0] is None or radii[1] is None else radii[0] * radii[1]

    def apply(self, state: Tensor) -> Tensor:
        return self.right.apply(self.left.apply(state))

    def matrix(self, key_dim: int) -> Tensor:
        left, right = self.left.matrix(key_dim), self.right.matrix(key_dim)
        dtype = torch.promote_types(left.dtype, right.dtype)  # the identity has none of its own
        return left.to(right.device, dtype) @ right.to(dtype)

    def steps(self) -> tuple[Transition, ...]:
        """A factor of one step joins its neighbour: a gate before n steps belongs to the first of them."""
        left, right = self.left.steps(), self.right.steps()
        if len(left) == len(right) == 1:
            is_plain = left[0] is self.left and right[0] is self.right  # else an axis n of size 1 was taken off
            return (self,) if is_plain else (Product(left[0], right[0]),)
        if len(left) == 1:
            return (Product(left[0], right[0]), *right[1:])
        if len(right) == 1:
            return (*left[:-1], Product(left[-1], right[0]))
        return left + right

    def lower(self) -> NormalForm:
        left, right = self.left.lower(), self.right.lower()
        blocks = _common_blocks(left, right)
        if left.erase is not None and right.erase is not None:
            left, right = left.multiplied(), right.multiplied()
        beta = right.erase_beta if left.erase_beta is None else left.erase_beta
        if right.log_decay is None:
            return replace(left, erase=_then(left.erase, right.erase), blocks=blocks, erase_beta=beta)
        if left.erase is None and not right.reads_before_decay:
            return replace(right, log_decay=_add(left.log_decay, right.log_decay, blocks), blocks=blocks)
        if right.erase is None and left.log_decay is None and left.erase is not None and _count(left.erase) == 1:
            read, direction = left.erase
            decay, direction = _per_channel(right.log_decay, direction, blocks)
            erase = read, direction * decay.exp()
            return NormalForm(right.log_decay, erase, reads_before_decay=True, blocks=blocks, erase_beta=beta)
        raise NotImplementedError(
            f"{type(self.right).__name__} decays after {type(self.left).__name__} has erased: this product has no "
            "normal form; put the gate first, or run form='recurrent'"
        )

    @classmethod
    def example(
        cls, batch: int, seq_len: int, num_heads: int, key_dim: int, generator: torch.Generator | None = None
    ) -> Self:
        """DiagonalGate @ Householder."""
        draw = functools.partial(_draw, batch, seq_len, num_heads, key_dim, generator)
        return cls(draw(DiagonalGate), draw(Householder))


class ProductModule(TransitionModule):
    """M_t as a product of factors; the writes multiply."""

    def __init__(self, factors: Sequence[TransitionModule]) -> None:
        super().__init__()
        if sum(f.num_writes > 1 for f in factors) > 1:
            raise ValueError("transition: expected at most one factor with count > 1, got several; merge their counts")
        self.factors = nn.ModuleList(factors)
        self.num_writes = max(f.num_writes for f in factors)
        self.needs_unit_keys = any(f.needs_unit_keys for f in factors)
        self.blocks = max(f.blocks for f in factors)
        self.formula = " ".join(f"({f.formula})" if " - " in f.formula else f.formula for f in factors)

    def forward(self, hidden: Tensor, key: Tensor) -> tuple[Transition, Tensor | None]:
        transition: Transition | None = None
        write: Tensor | None = None
        for factor in self.factors:
            value, factor_write = factor(hidden, key)
            transition = value if transition is None else Product(transition, value)
            if factor_write is not None:
                write = factor_write if write is None else write * factor_write
        assert transition is not None
        return transition, write

    def reset_parameters(self) -> None:
        for factor in self.factors:
            assert isinstance(factor, TransitionModule)
            factor.reset_parameters()


def build_transition(spec: tuple[FactorConfig, ...], sizes: HeadSizes) -> TransitionModule:
    """The module of a validated ``TransitionSpec``."""
    factors = [TRANSITIONS.class_of(config)(config, sizes) for config in spec]
    return factors[0] if len(factors) == 1 else ProductModule(factors)


def _draw(
    batch: int, seq_len: int, num_heads: int, key_dim: int, generator: torch.Generator | None, cls: type[Transition]
) -> Transition:
    return cls.example(batch, seq_len, num_heads, key_dim, generator)


Erase = tuple[Tensor, Tensor]


def _then(first: Erase | None, second: Erase | None) -> Erase | None:
    """Erase ``first``, then ``second``. Where there is one of them it stays as it is, the write key for what it is."""
    if first is None or second is None:
        return second if first is None else first
    num_heads = max(x.shape[-2] for pair in (first, second) for x in pair)
    read, direction = (
        torch.cat([expand_heads(with_steps(z), num_heads, dim=3) for z in pair], dim=2)
        for pair in zip(first, second, strict=True)
    )
    return read, direction


def _count(erase: Erase) -> int:
    return with_steps(erase[0]).shape[2]


def _common_blocks(left: NormalForm, right: NormalForm) -> int:
    blocks = max(left.blocks, right.blocks)
    for factor in (left, right):
        if factor.blocks not in (1, blocks) or (factor.blocks < blocks and factor.erase is not None):
            raise NotImplementedError(
                f"blocks: a product of {left.blocks} and {right.blocks} blocks has no normal form"
            )
    return blocks


def _add(x: Tensor | None, y: Tensor | None, blocks: int) -> Tensor | None:
    """Sum of two log decays of the normal form, whatever axes each has."""
    if x is None or y is None:
        return y if x is None else x
    x, y = with_last_axis(x), with_last_axis(y)
    key_dim = max(x.shape[-1], y.shape[-1])
    x, y = repeat_to(x, key_dim), repeat_to(y, key_dim)
    total = x + y
    return total.squeeze(-1) if total.shape[-1] == 1 and blocks == 1 else total


def _per_channel(log_decay: Tensor, direction: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """``log_decay`` and ``direction`` with the same heads and a channel axis each."""
    log_decay = repeat_to(with_last_axis(log_decay), direction.shape[-1])
    return log_decay, expand_heads(direction, log_decay.shape[-2], direction.ndim - 2)
