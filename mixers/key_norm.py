"""Key norms: the length of a query or key in each head (and block), computed in float32, or float64 for float64.

    l2    x / sqrt(sum x^2 + eps)        unit vectors: beta = 1 erases what lay along a key, and nothing else
    l1    x / max(sum |x|, eps)          of length 1 at most, as |x|_2 <= |x|_1: a delta rule stays bounded, erases less
    none  x

Sources: arXiv:2406.06484 section 3.3 (l2), arXiv:2102.11174 section 4.2 (l1, there called sum normalisation).
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KeyNorm = Literal["l2", "l1", "none"]


def unit_length(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis; a zero row stays zero."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def unit_sum(x: Tensor, *, eps: float = 1e-3) -> Tensor:
    """x / max(sum |x|, eps) over the last axis; a zero row stays zero, with a gradient that float16 can hold."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / wide.abs().sum(-1, keepdim=True).clamp(min=eps)).to(x.dtype)


def unchanged(x: Tensor) -> Tensor:
    return x


KEY_NORMS: dict[KeyNorm, Callable[[Tensor], Tensor]] = {"l2": unit_length, "l1": unit_sum, "none": unchanged}
