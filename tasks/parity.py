"""Parity: is the number of ones so far odd? The smallest task that needs a state that flips.

    tokens  1 0 1 1 0 ...        label at position t: (sum of the first t bits) mod 2

Trained on the first ``seq_len`` bits with a label from ``min_len`` on, and scored on the bits after those, up to
``heldout_len``: whoever only learned to count short sequences fails there. A transition with eigenvalues in [0, 1]
cannot flip anything, so it stays at chance, 0.5.

Shapes: B batch, T seq_len. Sources: arXiv:2411.12537 section 5.1 (eigenvalues in [-1, 1] solve it).
"""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field

from statemix.plugins import PartConfig

from .task import IGNORE, TASKS, Batch, Task, generator_for


@TASKS.register
class Parity(Task):
    """The parity task: fresh bits every step, held-out ones from another stream; the score is accuracy."""

    class Config(PartConfig):
        type: Literal["parity"] = "parity"
        min_len: int = Field(1, ge=1, description="shortest length with a label in training; the longest is seq_len")
        heldout_len: int | None = Field(None, ge=2, description="longest length that is scored; null = twice seq_len")

    config: Config

    @property
    def heldout_len(self) -> int:
        """Tokens of a held-out sequence; its labels begin behind ``seq_len``."""
        return self.config.heldout_len or 2 * self.seq_len

    def check(self) -> None:
        wanted, got = f"seq_len = {self.seq_len}", self.config.min_len
        if got > self.seq_len:
            self.refuse("min_len", f"expected at most {wanted}, got {got}; lower min_len or raise seq_len")
        if self.heldout_len <= self.seq_len:
            message = f"expected more than {wanted}, got {self.heldout_len}; raise heldout_len or lower seq_len"
            self.refuse("heldout_len", message)
        self.need_vocabulary(2, "two bits")

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """The batch of one step: lengths from ``min_len`` to ``seq_len`` at once, as prefixes."""
        generator = generator_for(self.seed, "train", step)
        return _draw(batch_size, self.seq_len, generator, labels_from=self.config.min_len)

    def heldout_batches(self, num_batches: int, batch_size: int) -> Iterator[Batch]:
        """Always the same batches; labels at the lengths that training never reached."""
        for index in range(num_batches):
            generator = generator_for(self.seed, "heldout", index)
            yield _draw(batch_size, self.heldout_len, generator, labels_from=self.seq_len + 1)


def _draw(batch: int, seq_len: int, generator: torch.Generator, *, labels_from: int) -> Batch:
    bits = torch.randint(2, (batch, seq_len), generator=generator)
    labels = bits.cumsum(1) % 2
    labels[:, : labels_from - 1] = IGNORE
    return Batch(bits, labels)
