"""A fixed decay: M_t = gamma_h I with one constant for each head. RetNet, lightning attention.

Shapes: HV value heads.
Source: arXiv:2307.08621 section 2.1, with gamma_h = 1 - 2^(-5 - h).
"""

from typing import Literal

import torch
from torch import Tensor

from statemix.kernels import NormalForm

from .base import Transition
from .kinds import Constant
from .modules.module import FactorConfig, HeadSizes, TransitionModule
from .modules.registry import register


class FixedDecay(Transition):
    """M_t = e^{log_decay} I.

    Attributes:
        log_decay: log gamma_h <= 0, [HV].
    """

    log_decay: Constant

    is_diagonal = True
    lowers_blocks = True

    @property
    def eigenvalue_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def apply(self, state: Tensor) -> Tensor:
        return self.log_decay.exp()[..., None, None] * state

    def matrix(self, key_dim: int) -> Tensor:
        eye = torch.eye(key_dim, dtype=self.log_decay.dtype, device=self.log_decay.device)
        return self.log_decay.exp()[..., None, None] * eye

    def lower(self) -> NormalForm:
        return NormalForm(log_decay=self.log_decay)


@register
class FixedDecayModule(TransitionModule):
    """gamma_h = 1 - 2^(-5 - h) for h = 0, 1, ...: half-lives from 22 tokens, doubling from head to head."""

    formula = "gamma I"
    log_decay: Tensor

    class Config(FactorConfig):
        type: Literal["fixed_decay"] = "fixed_decay"

    def __init__(self, config: Config, sizes: HeadSizes) -> None:
        super().__init__()
        self.register_buffer("log_decay", torch.empty(sizes.num_value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        heads = torch.arange(self.log_decay.shape[0], dtype=torch.float64, device=self.log_decay.device)
        self.log_decay.copy_(torch.log1p(-torch.exp2(-5 - heads)))

    def forward(self, hidden: Tensor, key: Tensor) -> tuple[FixedDecay, None]:
        return FixedDecay(self.log_decay), None
