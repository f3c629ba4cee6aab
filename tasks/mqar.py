"""Multi-query associative recall (MQAR): pairs first, then some keys again, each to be answered with its value.

    k1 v1 k2 v2 ... kN vN | . . k2 . k1 . . . k5 .      label at a repeated key: its value; IGNORE everywhere else

Keys come from 1 .. V/2 - 1 and values from V/2 .. V - 1, both without replacement. Pair i is asked at position
2N + 2 gap_i, the gaps drawn without replacement with p(x) ~ a x^(a - 1), x = gap + 1 = 1 .. (T - 2N) / 2: a small a
keeps most questions near the pairs. The places in between hold random tokens, or zeros.

Shapes: B batch, T seq_len, N pairs, V vocab_size. Source: arXiv:2312.04927 and the Zoology generator.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from statemix.plugins import PartConfig

from .task import IGNORE, TASKS, Batch, Task, generator_for


@TASKS.register
class Mqar(Task):
    """The MQAR task: fresh samples every step, held-out ones from another stream; the score is accuracy."""

    class Config(PartConfig):
        type: Literal["mqar"] = "mqar"
        num_pairs: int = Field(8, ge=1, description="key-value pairs a sequence; 4 * num_pairs <= seq_len")
        power: float = Field(
            0.01,
            gt=0,
            allow_inf_nan=False,
            description="a in p(gap) ~ a gap^(a - 1): how far queries are from their pairs",
        )
        random_non_queries: bool = Field(True, description="fill the places between queries with random tokens")

    config: Config

    def check(self) -> None:
        pairs = self.config.num_pairs
        if 4 * pairs > self.seq_len:
            self.refuse(
                "num_pairs",
                f"expected at most seq_len / 4 = {self.seq_len // 4}, got {pairs}; "
                f"lower num_pairs or set seq_len to {4 * pairs} or more",
            )
        self.need_vocabulary(2 * pairs + 2, f"two tokens for each of {pairs} pairs and two more")

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """The batch of one step."""
        return self._draw(batch_size, generator_for(self.seed, "train", step))

    def heldout_batches(self, num_batches: int, batch_size: int) -> Iterator[Batch]:
        """Always the same batches, none of them seen in training."""
        for index in range(num_batches):
            yield self._draw(batch_size, generator_for(self.seed, "heldout", index))

    def _draw(self, batch: int, generator: torch.Generator) -> Batch:
        context_len = 2 * self.config.num_pairs
        num_keys = self.vocab_size // 2
        keys = 1 + self._choose(torch.zeros(batch, num_keys - 1), generator)
        values = num_keys + self._choose(torch.zeros(batch, self.vocab_size - num_keys), generator)
        distance = torch.arange(1, (self.seq_len - context_len) // 2 + 1, dtype=torch.float32)
        gaps = self._choose(((self.config.power - 1) * distance.log()).expand(batch, -1), generator)
        asked_at = context_len + 2 * gaps
        tokens = torch.zeros(batch, self.seq_len, dtype=torch.int64)
        if self.config.random_non_queries:
            tokens = torch.randint(self.vocab_size, tokens.shape, generator=generator)
        tokens[:, :context_len] = torch.stack((keys, values), dim=2).flatten(1)
        tokens.scatter_(1, asked_at, keys)
        labels = torch.full_like(tokens, IGNORE).scatter_(1, asked_at, values)
        return Batch(tokens, labels)

    def _choose(self, log_weight: Tensor, generator: torch.Generator) -> Tensor:
        """Draw N of each row's columns one after another without replacement, p ~ exp(log_weight); [B, N] int64.

        The order of ``log_weight`` plus Gumbel noise is the order of such draws, so the largest N are the first N.
        """
        noise = torch.empty(log_weight.shape).exponential_(generator=generator)
        return (log_weight - noise.log()).topk(self.config.num_pairs, dim=1).indices
