"""A scalar gate: M_t = alpha_t I, one decay for each head and token. Mamba-2 (SSD), simple GLA.

Shapes: B batch, T time, HV value heads.
Source: arXiv:2405.21060 section 3 (SSD with scalar A_t).
"""

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from statemix.kernels import NormalForm

from .base import Transition
from .kinds import LogDecay
from .modules.decay_rate import LogSigmoidDecay, SoftplusDecay
from .modules.module import FactorConfig, HeadSizes, TransitionModule
from .modules.registry import register


class ScalarGate(Transition):
    """M_t = e^{log_decay} I.

    Attributes:
        log_decay: log alpha_t <= 0, [B, T, HV].
    """

    log_decay: LogDecay

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
class ScalarGateModule(TransitionModule):
    """alpha_t from a linear projection of the hidden state."""

    formula = "alpha_t I"

    class Config(FactorConfig):
        type: Literal["scalar_gate"] = "scalar_gate"
        formula: Literal["softplus", "logsigmoid"] = Field("softplus", description="see transitions/decay_rate.py")
        write: Literal["one", "dt"] = Field("one", description="what scales v k^T; dt is Mamba-2's step size")
        normalizer: float = Field(16.0, gt=0, description="divides logsigmoid(x)")

        @model_validator(mode="after")
        def dt_needs_softplus(self) -> Self:
            if self.write == "dt" and self.formula != "softplus":
                raise ValueError("write: 'dt' exists in the softplus formula only; use formula: softplus or write: one")
            return self

    def __init__(self, config: Config, sizes: HeadSizes) -> None:
        super().__init__()
        self.config, self.blocks = config, sizes.blocks
        num_heads, is_softplus = sizes.num_value_heads * sizes.blocks, config.formula == "softplus"
        self.projection = nn.Linear(sizes.hidden_size, num_heads, bias=not is_softplus)
        self.decay = SoftplusDecay(num_heads) if is_softplus else LogSigmoidDecay(config.normalizer)

    def reset_parameters(self) -> None:
        self.projection.reset_parameters()
        self.decay.reset_parameters()

    def forward(self, hidden: Tensor, key: Tensor) -> tuple[ScalarGate, Tensor | None]:
        log_decay, dt = self.decay(self.projection(hidden))
        if self.blocks > 1:
            log_decay = log_decay.unflatten(-1, (-1, self.blocks))
            dt = None if dt is None else dt.unflatten(-1, (-1, self.blocks))
        return ScalarGate(log_decay), dt if self.config.write == "dt" else None
