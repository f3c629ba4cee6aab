"""Root-mean-square norm: y = weight * x / sqrt(mean(x^2) + eps), over the last axis.

Source: arXiv:1910.07467.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statemix.plugins import PartConfig


class RMSNorm(nn.Module):
    """RMS norm over the last axis, computed in float32 (float64 for float64 inputs) and returned in x's dtype."""

    class Config(PartConfig):
        type: Literal["rms"] = "rms"

    def __init__(self, size: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps).to(x.dtype)
