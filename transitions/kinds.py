"""Kinds of per-token tensors: what a field of a transition may hold.

A kind fixes shape, range and default sampler of a field. Annotate the fields of a transition with the names below.

    LogDecay     [B, T, HV]      <= 0        natural log of a decay of the whole state
    KeyLogDecay  [B, T, HV, K]   <= 0        natural log of a decay of each key channel
    Rate         [B, T, HV]      in [0, 1]   a step size; ``Rate2`` allows [0, 2]
    KeyRate      [B, T, HV, K]   in [0, 1]   a step size of each key channel
    UnitKey      [B, T, H, K]    |x| = 1     a direction
    Key          [B, T, H, K]                any vector on the key side
    Constant     [HV]            <= 0        a log decay that does not depend on the token

Shapes: B batch, T time, H key heads, HV value heads, K key_dim.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kind:
    """Shape and range of a field.

    Attributes:
        name: as in the table above.
        low, high: closed range of the values.
        is_per_token: has the axes B and T.
        is_per_key_head: its heads are the H key heads rather than the HV value heads.
        has_channels: has a last axis of size K.
        is_unit: vectors of length one.
    """

    name: str
    low: float = -math.inf
    high: float = math.inf
    is_per_token: bool = True
    is_per_key_head: bool = False
    has_channels: bool = False
    is_unit: bool = False

    def shape(self, batch: int, seq_len: int, num_heads: int, num_value_heads: int, key_dim: int) -> tuple[int, ...]:
        tokens = (batch, seq_len) if self.is_per_token else ()
        heads = (num_heads if self.is_per_key_head else num_value_heads,)
        return tokens + heads + ((key_dim,) if self.has_channels else ())

    def sample(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """float64 values in range: decays between e^-5 and 1, rates uniform, vectors normal."""
        if self.high == 0:
            return -5 * torch.rand(shape, generator=generator, dtype=torch.float64) ** 3
        if self.low == 0:
            return self.high * torch.rand(shape, generator=generator, dtype=torch.float64)
        vectors = torch.randn(shape, generator=generator, dtype=torch.float64)
        return vectors / vectors.norm(dim=-1, keepdim=True) if self.is_unit else vectors


LogDecay = Annotated[Tensor, Kind("LogDecay", high=0.0)]
KeyLogDecay = Annotated[Tensor, Kind("KeyLogDecay", high=0.0, has_channels=True)]
Rate = Annotated[Tensor, Kind("Rate", low=0.0, high=1.0)]
Rate2 = Annotated[Tensor, Kind("Rate2", low=0.0, high=2.0)]
KeyRate = Annotated[Tensor, Kind("KeyRate", low=0.0, high=1.0, has_channels=True)]
UnitKey = Annotated[Tensor, Kind("UnitKey", is_per_key_head=True, has_channels=True, is_unit=True)]
Key = Annotated[Tensor, Kind("Key", is_per_key_head=True, has_channels=True)]
Constant = Annotated[Tensor, Kind("Constant", high=0.0, is_per_token=False)]
