"""The identity transition: M_t = I, nothing is ever forgotten. Linear attention.

Source: arXiv:2006.16236 section 3.
"""

from typing import Literal, Self

import torch
from torch import Tensor

from statemix.kernels import NormalForm

from .base import Transition
from .modules.module import FactorConfig, HeadSizes, TransitionModule
from .modules.registry import register


class Identity(Transition):
    """M_t = I.

    >>> Identity().materialize(key_dim=2)
    tensor([[1., 0.],
            [0., 1.]])
    """

    is_diagonal = True
    lowers_blocks = True

    @property
    def eigenvalue_range(self) -> tuple[float, float]:
        return 1.0, 1.0

    def apply(self, state: Tensor) -> Tensor:
        return state

    def matrix(self, key_dim: int) -> Tensor:
        return torch.eye(key_dim)

    def lower(self) -> NormalForm:
        return NormalForm()

    @classmethod
    def example(
        cls, batch: int, seq_len: int, num_heads: int, key_dim: int, generator: torch.Generator | None = None
    ) -> Self:
        return cls()


@register
class IdentityModule(TransitionModule):
    """M_t = I, no parameters."""

    formula = "I"

    class Config(FactorConfig):
        type: Literal["identity"] = "identity"

    def __init__(self, config: Config, sizes: HeadSizes) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, key: Tensor) -> tuple[Identity, None]:
        return Identity(), None
