"""What makes a transition inside a mixer: a small module from hidden states to the value and its write.

    module(hidden, key) -> (transition, write)

Shapes: B batch, T time, n writes a token, H key heads, HV value heads, K key_dim.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from statemix.plugins import PartConfig
from statemix.transitions.base import Transition


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


def at_least_float32(x: Tensor) -> Tensor:
    """Gates are computed in float32 whatever autocast made of the projection, in float64 for float64 models."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
