"""Next-token prediction over two long streams of tokens, one to train on and one held out.

Training windows start anywhere in the one, held-out windows are fixed and evenly spaced in the other.

Shapes: B batch, T seq_len. A window is T + 1 tokens: T inputs and, one further, their T labels.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from statemix.blocks import CausalLM, generate

from .task import Batch, Task, generator_for

PROMPT_TOKENS = 64
NEW_TOKENS = 240


class Split(NamedTuple):
    """Two streams without a place in common, [num_tokens] each, of one integer dtype."""

    train: Tensor
    heldout: Tensor


class TokenStream(Task):
    """A task whose data are a ``Split``; a subclass says how that is read."""

    @abstractmethod
    def read(self) -> Split:
        """Read the tokens; called once."""

    @cached_property
    def split(self) -> Split:
        """The tokens, found to fill a window on each side and to be known to the model."""
        split = self.read()
        shorter = min(split, key=len)
        if len(shorter) <= self.seq_len:
            raise ValueError(
                f"training.seq_len: expected less than the tokens to train on, {len(split.train)}, and the held-out "
                f"ones, {len(split.heldout)}, got {self.seq_len}; lower it, or name more data"
            )
        smallest = min(int(stream.min()) for stream in split)
        if smallest < 0:
            raise ValueError(f"training.task: expected tokens from 0 up, got {smallest}; name other data")
        self.need_vocabulary(1 + max(int(stream.max()) for stream in split), "one more than the largest token")
        return split

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """The batch of one step: ``batch_size`` windows that start anywhere in the stream."""
        generator = generator_for(self.seed, "train", step)
        starts = torch.randint(len(self.split.train) - self.seq_len, (batch_size,), generator=generator)
        return self._windows(self.split.train, starts)

    def heldout_batches(self, num_batches: int, batch_size: int) -> Iterator[Batch]:
        """Evenly spaced windows that do not overlap; fewer than asked for when the stream is short."""
        last_start = len(self.split.heldout) - self.seq_len - 1
        count = min(num_batches * batch_size, 1 + last_start // self.seq_len)
        starts = torch.tensor([index * last_start // max(count - 1, 1) for index in range(count)])
        for chosen in starts.split(batch_size):
            yield self._windows(self.split.heldout, chosen)

    def fingerprint(self) -> str:
        """Hash of both streams."""
        digest = hashlib.sha256()
        for stream in self.split:
            digest.update(stream.contiguous().numpy().data)
        return digest.hexdigest()

    def sample(self, model: CausalLM, *, temperature: float = 0.7) -> str | None:
        """The start of the held-out stream, continued."""
        if self.decode([]) is None:
            return None
        device = next(model.parameters()).device
        prompt = self.split.heldout[None, :PROMPT_TOKENS].long().to(device)
        generator = torch.Generator(device).manual_seed(self.seed)
        tokens = generate(model, prompt, max_new_tokens=NEW_TOKENS, temperature=temperature, generator=generator)
        return self.decode(tokens[0].tolist())

    def _windows(self, stream: Tensor, starts: Tensor) -> Batch:
        windows = stream[starts[:, None] + torch.arange(self.seq_len + 1)].long()
        return Batch(windows[:, :-1], windows[:, 1:])
