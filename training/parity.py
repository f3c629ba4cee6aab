"""Parity: is the number of ones so far odd? The smallest task that needs a state that flips.

    tokens  1 0 1 1 0 ...        label at position t: (sum of the first t bits) mod 2

Trained on the first ``max_len`` bits with a label from ``min_len`` on, and scored on the bits after those, up to
``heldout_len``: whoever only learned to count short sequences fails there. A transition with eigenvalues in [0, 1]
cannot flip anything, so it stays at chance, 0.5.

Shapes: B batch, T seq_len. Sources: arXiv:2411.12537 section 5.1 (eigenvalues in [-1, 1] solve it).
"""

import hashlib
from collections.abc import Iterator

import torch

from .batch import IGNORE, Batch, generator_for


class Parity:
    """The parity task: fresh bits every step, held-out ones from another stream; the score is accuracy."""

    metric = "accuracy"
    vocab_size = 2

    def __init__(self, *, min_len: int, max_len: int, heldout_len: int, seed: int) -> None:
        self.min_len = min_len
        self.max_len = max_len
        self.heldout_len = heldout_len
        self.seed = seed

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """The batch of one step: lengths from ``min_len`` to ``max_len`` at once, as prefixes."""
        return _draw(batch_size, self.max_len, generator_for(self.seed, "train", step), labels_from=self.min_len)

    def heldout_batches(self, num_batches: int, batch_size: int) -> Iterator[Batch]:
        """Always the same batches; labels at the lengths that training never reached."""
        for index in range(num_batches):
            generator = generator_for(self.seed, "heldout", index)
            yield _draw(batch_size, self.heldout_len, generator, labels_from=self.max_len + 1)

    def fingerprint(self) -> str:
        """Hash of the generator's settings: equal fingerprints mean equal batches."""
        return hashlib.sha256(repr(sorted(vars(self).items())).encode()).hexdigest()


def _draw(batch: int, seq_len: int, generator: torch.Generator, *, labels_from: int) -> Batch:
    bits = torch.randint(2, (batch, seq_len), generator=generator)
    labels = bits.cumsum(1) % 2
    labels[:, : labels_from - 1] = IGNORE
    return Batch(bits, labels)
