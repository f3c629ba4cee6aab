"""The gate on a read-out, o * map(W_g x), before the output projection.

Shapes: B batch, T time, HV value heads, V value_dim.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class OutputGate(nn.Linear):
    """W_g and the map on it."""

    def __init__(self, hidden_size: int, channels: int, *, kind: Literal["silu", "sigmoid"]) -> None:
        super().__init__(hidden_size, channels, bias=False)
        self.map = _MAPS[kind]

    def forward(self, mixed: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
        """[B, T, HV, V], gated by ``hidden`` [B, T, hidden_size]."""
        return mixed * self.map(super().forward(hidden)).unflatten(-1, mixed.shape[-2:])


class NoGate(nn.Module):
    """The read-out as it is."""

    def forward(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        return mixed
