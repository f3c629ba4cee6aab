"""Rotary positions: channels c and c + D/2 turn by the angle position * base^(-2c/D).

The product of a turned query and a turned key depends on the distance between their positions only.
Source: arXiv:2104.09864 (here with the two halves of the channels as pairs).
"""

import torch
from torch import Tensor, nn

from .packing import positions


def rotate(x: Tensor, position: Tensor, *, base: float) -> Tensor:
    """Turn ``x`` [B, T, ..., D], D even, to ``position`` [B, T]; angles and products in float32, or float64 for it."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=dtype, device=x.device) / half)
    angle = position.view(*position.shape, *[1] * (x.ndim - 2)).to(dtype) * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(dtype).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class Rotary(nn.Module):
    """Queries and keys turned to their positions, which go on from the state.

    Attributes:
        num_counts: numbers that the state keeps a sequence: of its tokens so far.
    """

    num_counts = 1

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base

    def forward(
        self, query: Tensor, key: Tensor, seen: Tensor, *, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, T, ..., D] after ``seen`` [B or N, 1] tokens, turned; and the tokens seen now."""
        position, after = positions(seen.squeeze(-1), seq_len=query.shape[1], cu_seqlens=cu_seqlens)
        query, key = (rotate(x, position, base=self.base) for x in (query, key))
        return query, key, after[:, None]


class NoPositions(nn.Module):
    """Queries and keys as they are; ``seen`` is [B or N, 0]."""

    num_counts = 0

    def forward(
        self, query: Tensor, key: Tensor, seen: Tensor, *, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return query, key, seen
