"""Padding, dealt with once for a whole model: real tokens are laid end to end, one document a row of the batch.

Layers then know packed documents only. No layer can let a pad decay its state, enter its convolution or shift its
positions, wherever the pads are, and no time is spent on them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the real tokens of a padded batch are.

    Attributes:
        shape: (B, T) of the batch.
        places: index of each packed token in the flattened batch, [num_real], or one pad where nothing is real.
        cu_seqlens: offsets of the rows in the packed one, int32 [B + 1].
    """

    shape: tuple[int, int]
    places: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> "Packing":
        """From ``mask`` [B, T] bool, True = real, in any pattern. Reads their number, hence waits for the device."""
        flat = mask.flatten()
        # One pad is kept when nothing is real: a row of no tokens is refused further down.
        places = torch.argsort(~flat, stable=True)[: max(int(flat.sum()), 1)]
        ends = mask.sum(dim=1).cumsum(0)
        cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        return cls((mask.shape[0], mask.shape[1]), places, cu_seqlens)

    def pack(self, tokens: Tensor) -> Tensor:
        """[B, T] to [1, num_real]."""
        return tokens.flatten()[self.places][None]

    def unpack(self, packed: Tensor) -> Tensor:
        """[1, num_real, C] to [B, T, C], zeros at the pads."""
        flat = packed.new_zeros(self.shape[0] * self.shape[1], packed.shape[-1])
        return flat.index_copy(0, self.places, packed[0]).view(*self.shape, -1)
