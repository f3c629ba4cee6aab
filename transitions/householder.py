"""Householder transitions: M_t = I - beta_t u_t u_t^T, acting on the key side of the state.

Each step rewrites the part of the state that lies along u_t (unit length) and leaves the rest:
beta = 0 keeps it, beta = 1 erases it, beta = 2 reflects it. beta in (1, 2] gives M_t a negative
eigenvalue, which parity and other state-tracking tasks need. With count n a token takes n such steps.

    S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T        DeltaNet: u = k, write = beta

Shapes: B batch, T time, n steps a token, H key heads, HV value heads, K key_dim.
Sources: arXiv:2102.11174 (delta rule), arXiv:2406.06484 (chunk form), arXiv:2411.12537 (beta > 1),
arXiv:2502.10297 (products of n).
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from statemix.kernels import NormalForm

from .base import Transition
from .kinds import Rate2, UnitKey
from .modules.module import FactorConfig, HeadSizes, TransitionModule, at_least_float32
from .modules.registry import register


class Householder(Transition):
    """M_t = I - beta_t u_t u_t^T, or the product of n of them.

    Attributes:
        direction: u, unit vectors, [B, T, H, K] or [B, T, n, H, K]; pass the write key itself for the delta rule.
        beta: step size in [0, 2], [B, T, HV] or [B, T, n, HV].
    """

    direction: UnitKey
    beta: Rate2

    lowers_blocks = True

    @property
    def eigenvalue_range(self) -> tuple[float, float] | None:
        """[-1, 1] for one factor; a product of several is not symmetric and its spectrum not real."""
        return (-1.0, 1.0) if self.direction.ndim < 5 else None

    @property
    def spectral_radius(self) -> float:
        return 1.0

    @property
    def write_key(self) -> Tensor:
        return self.direction

    @property
    def natural_write(self) -> Tensor:
        return self.beta

    def apply(self, state: Tensor) -> Tensor:
        removed = torch.einsum("...vk,...k->...v", state, self.direction)
        return state - self.beta[..., None, None] * removed[..., :, None] * self.direction[..., None, :]

    def matrix(self, key_dim: int) -> Tensor:
        u, beta = self.expand_heads(self.beta.shape[-1]).direction, self.beta
        eye = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
        return eye - beta[..., None, None] * u[..., :, None] * u[..., None, :]

    def steps(self) -> tuple["Householder", ...]:
        if self.direction.ndim < 5:
            return (self,)
        pairs = zip(self.direction.unbind(2), self.beta.unbind(2), strict=True)
        return tuple(self._rebuild(pair) for pair in pairs)

    def lower(self) -> NormalForm:
        return NormalForm(erase=(self.direction, self.direction), erase_beta=self.beta)


@register
class HouseholderModule(TransitionModule):
    """beta_t = max_beta * sigmoid(W x_t), which is also the write; u_t the write key or a projection of its own."""

    class Config(FactorConfig):
        type: Literal["householder"] = "householder"
        count: int = Field(1, ge=1, le=8, description="n, steps a token")
        max_beta: float = Field(1.0, gt=0, le=2, description="beta lies in [0, max_beta]; 2 allows reflections")
        direction: Literal["key", "projection"] = Field("key", description="u: the write key, or its own projection")

    def __init__(self, config: Config, sizes: HeadSizes) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes
        self.num_writes, self.blocks = config.count, sizes.blocks
        self.needs_unit_keys = config.direction == "key"
        self.beta = nn.Linear(sizes.hidden_size, config.count * sizes.num_value_heads * sizes.blocks, bias=False)
        self.direction: nn.Linear | None = None
        if config.direction == "projection":
            self.direction = nn.Linear(sizes.hidden_size, config.count * sizes.num_heads * sizes.key_dim, bias=False)
        vector = "k" if config.direction == "key" else "u"
        index, product = ("t", "") if config.count == 1 else ("tj", f"prod_{{j <= {config.count}}} ")
        step = f"I - beta_{index} {vector}_{index} {vector}_{index}^T"
        self.formula = step if config.count == 1 else f"{product}({step})"

    def reset_parameters(self) -> None:
        self.beta.reset_parameters()
        if self.direction is not None:
            self.direction.reset_parameters()

    def forward(self, hidden: Tensor, key: Tensor) -> tuple[Householder, Tensor]:
        sizes, count = self.sizes, self.config.count
        beta = self.config.max_beta * torch.sigmoid(at_least_float32(self.beta(hidden)))
        beta = beta.unflatten(-1, (count, sizes.num_value_heads, sizes.blocks))
        beta = beta.squeeze(-1) if sizes.blocks == 1 else beta
        beta = beta.squeeze(2) if count == 1 else beta
        return Householder(key if self.direction is None else self._unit(self.direction(hidden)), beta), beta

    def _unit(self, x: Tensor) -> Tensor:
        sizes, count = self.sizes, self.config.count
        x = x.unflatten(-1, (count, sizes.num_heads, sizes.blocks, -1))
        x = F.normalize(x, dim=-1).flatten(-2, -1)
        return x.squeeze(2) if count == 1 else x
