"""Data-dependent decays: how a projection x of the hidden state becomes log alpha <= 0.

    softplus      log alpha = -exp(A_log) * dt,  dt = softplus(x + dt_bias)      Mamba-2, gated DeltaNet, KDA
    logsigmoid    log alpha = logsigmoid(x) / normalizer                          GLA

Initialisation: A uniform in [1, 16]; softplus(dt_bias) log-uniform in [1e-3, 0.1].
Source: arXiv:2405.21060 section 7 (softplus), arXiv:2312.06635 section 4.4 (logsigmoid, normalizer 16).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .module import at_least_float32


class SoftplusDecay(nn.Module):
    """log alpha = -exp(A_log) softplus(x + dt_bias); ``A_log`` has the heads, ``dt_bias`` the heads and channels of x.

    Args:
        num_heads: HV.
        num_channels: 0 for x of [..., HV], else x is [..., HV, num_channels].
    """

    def __init__(self, num_heads: int, num_channels: int = 0) -> None:
        super().__init__()
        channels = (num_channels,) if num_channels else ()
        self.A_log = nn.Parameter(torch.empty(num_heads, *[1 for _ in channels]))
        self.dt_bias = nn.Parameter(torch.empty(num_heads, *channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw anew, and mark as free of weight decay: ``to_empty`` makes new parameters without the mark."""
        for parameter in self.parameters():
            parameter.no_weight_decay = True  # type: ignore[attr-defined]
        self.A_log.uniform_(1, 16).log_()
        dt = self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log alpha and dt, in float32 at least: a bfloat16 decay near 1 would forget too fast or never."""
        dt = F.softplus(at_least_float32(x) + self.dt_bias)
        return -self.A_log.exp() * dt, dt


class LogSigmoidDecay(nn.Module):
    """log alpha = logsigmoid(x) / normalizer."""

    def __init__(self, normalizer: float) -> None:
        super().__init__()
        self.normalizer = normalizer

    def reset_parameters(self) -> None:
        """Nothing to draw."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """log alpha, and None: this formula has no dt."""
        return F.logsigmoid(at_least_float32(x)) / self.normalizer, None
