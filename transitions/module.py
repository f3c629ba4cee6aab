"""What makes a transition inside a mixer: a small module from hidden states to the value and its write.

    module(hidden, key) -> (transition, write)

Shapes: B batch, T time, n writes a token, H key heads, HV value heads, K key_dim.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from statemix.plugins import PartConfig

from .base import Transition
from .product import Product


class FactorConfig(PartConfig):
    """Options of one factor of M_t; a subclass narrows ``type`` to the name it goes by."""

    model_config = ConfigDict(strict=True)


@dataclass(frozen=True)
class HeadSizes:
    """Sizes a transition module is built for; ``blocks`` > 1 inside a block-diagonal transition."""

    hidden_size: int
    num_heads: int
    num_value_heads: int
    key_dim: int
    blocks: int = 1


class TransitionModule(nn.Module):
    """Base of the modules; ``formula`` is M_t in words.

    Attributes:
        num_writes: n, keys and values a token.
        needs_unit_keys: M_t is bounded only for keys of length one.
        blocks: diagonal blocks of M_t; keys have unit length in each.
    """

    Config: ClassVar[type[FactorConfig]]
    num_writes: int = 1
    needs_unit_keys: bool = False
    blocks: int = 1
    formula: str

    @abstractmethod
    def forward(self, hidden: Tensor, key: Tensor) -> tuple[Transition, Tensor | None]:
        """The transition and its write for hidden [B, T, hidden_size] and key [B, T, H, K] or [B, T, n, H, K].

        A write of None means 1.
        """

    def reset_parameters(self) -> None:
        """Draw every parameter and buffer anew, also after ``to_empty`` on a model built on the meta device."""


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
            made, factor_write = factor(hidden, key)
            transition = made if transition is None else Product(transition, made)
            if factor_write is not None:
                write = factor_write if write is None else write * factor_write
        assert transition is not None
        return transition, write

    def reset_parameters(self) -> None:
        for factor in self.factors:
            assert isinstance(factor, TransitionModule)
            factor.reset_parameters()


def at_least_float32(x: Tensor) -> Tensor:
    """Gates are computed in float32 whatever autocast made of the projection, in float64 for float64 models."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
