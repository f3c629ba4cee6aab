"""How far a result may lie from the float64 reference: derived, never picked.

A run one precision lower says how errors grow on these very inputs: where it is off by e, the result may be off by
SAFETY * e * eps(result) / eps(lower run), and a fault, which does not shrink with eps, stands out. Rounding the result
into its dtype costs one eps more. NaN and infinity are never allowed.

    float64 results      the same form run in float32; vector by vector (the channels of one token and head), so that an
                         error in a small entry counts as much as one in a large entry
    float32 and 16 bits  the definition run in float32, which is what they are computed in; over the whole tensor

The idea of a low-precision reference instead of constants: meta-pytorch/attention-gym.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

SAFETY = 256.0  # the worst of 1e5 vectors, rounded differently by two runs of one form; a fault is off by far more
NEIGHBOURS = 2  # vectors on either side that say how large a relative error is: one alone can be right by accident


@dataclass(frozen=True)
class Reference:
    """A tensor in float64, and by how much the definition in float32 misses it."""

    exact: Tensor
    low: Tensor

    def excess(self, got: Tensor) -> "Excess | None":
        """The vector furthest beyond its allowance, or None."""
        if not got.numel() and got.shape == self.exact.shape:
            return None
        if got.shape != self.exact.shape:
            return Excess((), math.nan, math.nan, f"shape {list(got.shape)}, expected {list(self.exact.shape)}")
        eps, eps_low = torch.finfo(got.dtype).eps, torch.finfo(self.low.dtype).eps
        eps_computed = min(eps, eps_low)  # 16-bit results are computed in float32
        error = errors = lengths(got.double() - self.exact)
        size, low_error = lengths(self.exact), lengths(self.low.double() - self.exact)
        if got.dtype == torch.float64:
            relative = (low_error / size.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
            low_error = torch.maximum(low_error, _largest_nearby(relative) * size)
        else:
            error, low_error, size = (x.square().mean().sqrt() for x in (error, low_error, size))
        allowed = SAFETY * eps_computed * (low_error / eps_low + size) + eps * size
        allowed = allowed.nan_to_num(0.0)  # a lower run that is not finite allows nothing
        beyond = torch.where(error.isfinite(), error - allowed, torch.inf)
        index = int(beyond.argmax())
        if beyond.flatten()[index] <= 0:
            return None
        if error.ndim == 0:  # the whole tensor is off: point at its worst vector
            index = int(torch.where(errors.isfinite(), errors, torch.inf).argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), errors.shape))
        return Excess(place, float(errors.flatten()[index]), float(allowed.flatten()[-1 if error.ndim == 0 else index]))


@dataclass(frozen=True)
class Excess:
    """An error beyond its allowance: the index of the vector, the error there and what was allowed."""

    index: tuple[int, ...]
    error: float
    allowed: float
    note: str = ""

    def __str__(self) -> str:
        return self.note or f"error {self.error:.3g}, allowed {self.allowed:.3g}"


def lengths(x: Tensor) -> Tensor:
    """Length of each vector along the last axis; a tensor of one axis is taken entry by entry."""
    return torch.linalg.vector_norm(x, dim=-1) if x.ndim > 1 else x.abs()


def _largest_nearby(x: Tensor) -> Tensor:
    """The largest of each entry and its neighbours along the second axis: tokens, or heads of a state."""
    if x.ndim < 2:
        return x.max().expand_as(x)
    along = x.movedim(1, -1)
    pooled = F.max_pool1d(along.reshape(-1, 1, along.shape[-1]), 2 * NEIGHBOURS + 1, stride=1, padding=NEIGHBOURS)
    return pooled.view(along.shape).movedim(-1, 1)
