"""Rotary positions: channels c and c + D/2 turn by the angle position * base^(-2c/D).

The product of a turned query and a turned key depends on the distance between their positions only.
Source: arXiv:2104.09864 (here with the two halves of the channels as pairs).
"""

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, *, base: float) -> Tensor:
    """Turn ``x`` [B, T, ..., D], D even, to ``positions`` [B, T]; angles and products in float32, or float64 for it."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=dtype, device=x.device) / half)
    angle = positions.view(*positions.shape, *[1] * (x.ndim - 2)).to(dtype) * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x.to(dtype).split(half, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)
