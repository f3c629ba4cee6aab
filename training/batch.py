"""One batch of a task, and the generator that draws it.

Every batch is a function of (seed, stream, step) alone. So the data position of a run is its step: nothing else has to
be saved to go on exactly where a run stopped.
"""

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100  # the label of a position where nothing is asked; cross_entropy's own default


class Batch(NamedTuple):
    """Tokens and what the logits at each position should say.

    Attributes:
        tokens: [B, T] int64.
        labels: [B, T] int64, already aligned with the logits; IGNORE where nothing is asked.
    """

    tokens: Tensor
    labels: Tensor

    def num_valid(self) -> int:
        """Number of positions with a label."""
        return int((self.labels != IGNORE).sum())

    def split(self, size: int) -> list["Batch"]:
        """Micro-batches of ``size`` rows, in order."""
        return [Batch(*parts) for parts in zip(self.tokens.split(size), self.labels.split(size), strict=True)]

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.tokens.to(device), self.labels.to(device))


def generator_for(seed: int, stream: str, step: int) -> torch.Generator:
    """A CPU generator for one batch; different streams (``train``, ``heldout``) share no samples."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{step}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
