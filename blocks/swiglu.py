"""SwiGLU: y = W_down (silu(W_gate x) * W_up x).

Source: arXiv:2002.05202.
"""

import math
from typing import Literal

import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from statemix.plugins import PartConfig

from .mlp import MLPS

_MULTIPLE = 256
_RATIO = 4.0


@MLPS.register
class SwiGLU(nn.Module):
    """Gated two-layer perceptron on each token."""

    class Config(PartConfig):
        type: Literal["swiglu"] = "swiglu"
        ratio: float | None = Field(
            None, gt=0, description="width = ratio * 2/3 * hidden_size, rounded up to 256; 4 unless width is given"
        )
        width: int | None = Field(None, gt=0, description="inner channels, in place of ratio")

        @model_validator(mode="after")
        def _one_of_ratio_and_width(self) -> "SwiGLU.Config":
            if self.ratio is not None and self.width is not None:
                raise ValueError(
                    f"ratio: expected null beside width {self.width}, got {self.ratio}; give one of the two"
                )
            return self

        def inner_size(self, hidden_size: int) -> int:
            """Inner channels for ``hidden_size``."""
            if self.width is not None:
                return self.width
            ratio = _RATIO if self.ratio is None else self.ratio
            return math.ceil(2 * ratio * hidden_size / (3 * _MULTIPLE)) * _MULTIPLE

    def __init__(self, config: Config, *, hidden_size: int) -> None:
        super().__init__()
        width = config.inner_size(hidden_size)
        self.gate = nn.Linear(hidden_size, width, bias=False)
        self.up = nn.Linear(hidden_size, width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        """Draw all parameters anew: normal(0, init_std), the down projection times output_scale."""
        nn.init.normal_(self.gate.weight, std=init_std)
        nn.init.normal_(self.up.weight, std=init_std)
        nn.init.normal_(self.down.weight, std=init_std * output_scale)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y
