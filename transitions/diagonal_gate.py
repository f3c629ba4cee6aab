"""A diagonal gate: M_t = Diag(alpha_t), one decay for each key channel and token. GLA; the gate of KDA.

Shapes: B batch, T time, HV value heads, K key_dim.
Source: arXiv:2312.06635 sections 3 and 4.4; arXiv:2510.26692 section 3 (softplus form, KDA).
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from statemix.kernels import NormalForm

from .base import Transition
from .kinds import KeyLogDecay
from .modules.decay_rate import LogSigmoidDecay, SoftplusDecay
from .modules.module import FactorConfig, HeadSizes, TransitionModule
from .modules.registry import register


class DiagonalGate(Transition):
    """M_t = Diag(e^{log_decay}).

    Attributes:
        log_decay: log alpha_t <= 0, [B, T, HV, K].
    """

    log_decay: KeyLogDecay

    is_diagonal = True
    lowers_blocks = True

    @property
    def eigenvalue_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def apply(self, state: Tensor) -> Tensor:
        return state * self.log_decay.exp().unsqueeze(-2)

    def matrix(self, key_dim: int) -> Tensor:
        return torch.diag_embed(self.log_decay.exp())

    def lower(self) -> NormalForm:
        return NormalForm(log_decay=self.log_decay)


@register
class DiagonalGateModule(TransitionModule):
    """alpha_t from a low-rank projection of the hidden state."""

    formula = "Diag(alpha_t)"

    class Config(FactorConfig):
        type: Literal["diagonal_gate"] = "diagonal_gate"
        formula: Literal["softplus", "logsigmoid"] = Field("logsigmoid", description="see transitions/decay_rate.py")
        rank: int | None = Field(16, gt=0, description="inner width of the projection; null for key_dim")
        normalizer: float = Field(16.0, gt=0, description="divides logsigmoid(x)")

    def __init__(self, config: Config, sizes: HeadSizes) -> None:
        super().__init__()
        self.blocks, self.key_dim = sizes.blocks, sizes.key_dim
        is_softplus, rank = config.formula == "softplus", config.rank or sizes.key_dim
        self.down = nn.Linear(sizes.hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, sizes.num_value_heads * sizes.key_dim, bias=not is_softplus)
        self.decay = (
            SoftplusDecay(sizes.num_value_heads, sizes.key_dim) if is_softplus else LogSigmoidDecay(config.normalizer)
        )

    def reset_parameters(self) -> None:
        self.down.reset_parameters()
        self.up.reset_parameters()
        self.decay.reset_parameters()

    def forward(self, hidden: Tensor, key: Tensor) -> tuple[DiagonalGate, None]:
        log_decay, _ = self.decay(self.up(self.down(hidden)).unflatten(-1, (-1, self.key_dim)))
        return DiagonalGate(log_decay), None
