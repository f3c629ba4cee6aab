"""What a task is: batches by step, held-out batches, and the metric that they are scored by.

Every batch is a function of (seed, stream, step) alone. So the data position of a run is its step: nothing else has to
be saved to go on exactly where a run stopped.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from statemix.blocks import CausalLM
from statemix.plugins import PartConfig, Registry

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


@dataclass(frozen=True)
class Metric:
    """What held-out data are scored by.

    Attributes:
        name: as in result.json, ``bits_per_byte``.
        from_loss: the score that a mean loss in nats stands for; None where the score is the accuracy, the share of
            labelled positions whose most likely token is the label.
    """

    name: str
    lower_is_better: bool
    from_loss: Callable[[float], float] | None = None

    @classmethod
    def bits_per(cls, token: str) -> "Metric":
        """Mean negative log2 probability of the next ``byte``, ``word``, ...: the loss in bits."""
        return cls(f"bits_per_{token}", lower_is_better=True, from_loss=lambda nats: nats / math.log(2))

    @property
    def words(self) -> str:
        """The name for reading, ``bits per byte``."""
        return self.name.replace("_", " ")

    @property
    def unit(self) -> str:
        """What stands behind a value, ``bits/byte``."""
        return self.words.replace(" per ", "/")


ACCURACY = Metric("accuracy", lower_is_better=False)


class Task(ABC):
    """One task with its options and sizes. Making it reads no data: that waits until they are asked for.

    A subclass has a ``Config`` with the options that a recipe may give, whose ``type`` is its name there, and is
    decorated with ``TASKS.register``.

    Attributes:
        metric: what held-out batches are scored by.
        other_data: the refusal of a run that would go on with data of another fingerprint.
    """

    metric: ClassVar[Metric] = ACCURACY
    other_data: ClassVar[str] = (
        "training.task: expected the data this run began with, got other data; restore them, or start a new run"
    )

    config: Any  # the subclass's own Config

    def __init__(self, config: PartConfig, *, vocab_size: int, seq_len: int, seed: int) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.seed = seed

    def check(self) -> None:  # noqa: B027  (nothing to refuse is an answer)
        """Refuse options and sizes that do not go together; called before anything is built, so it reads no data.

        ``refuse`` and ``need_vocabulary`` say how.
        """

    @abstractmethod
    def train_batch(self, step: int, batch_size: int) -> Batch:
        """The batch of one step, from 1: the same whenever it is asked for."""

    @abstractmethod
    def heldout_batches(self, num_batches: int, batch_size: int) -> Iterator[Batch]:
        """Always the same batches, none of them seen in training."""

    def fingerprint(self) -> str:
        """Hash of the options and sizes: equal fingerprints mean equal batches. With data from files, of those."""
        sizes = {"vocab_size": self.vocab_size, "seq_len": self.seq_len, "seed": self.seed}
        settings = sizes | self.config.model_dump(exclude={"type"})
        return hashlib.sha256(repr(sorted(settings.items())).encode()).hexdigest()

    def encode(self, text: bytes) -> list[int] | None:
        """The tokens of a prompt; None where tokens stand for no text."""
        return None

    def decode(self, tokens: list[int]) -> str | None:
        """The text of tokens; None where they stand for none."""
        return None

    def sample(self, model: CausalLM) -> str | None:
        """Text of the model behind its prompt, the same every time; None where there is no text."""
        return None

    def refuse(self, key: str, message: str) -> NoReturn:
        """Raise ValueError about an option: ``training.task.KEY: expected ..., got ...; what to do``."""
        raise ValueError(f"training.task.{key}: {message}")

    def need_vocabulary(self, needed: int, reason: str) -> None:
        """Raise ValueError where the model has fewer than ``needed`` tokens; ``reason`` says what they are for."""
        if self.vocab_size < needed:
            raise ValueError(
                f"model.vocab_size: expected {needed} or more for task {self.config.type} ({reason}), "
                f"got {self.vocab_size}; set vocab_size: {needed}"
            )


TASKS: Registry[Task] = Registry(
    "task", takes_name=True, methods=("check", "train_batch", "heldout_batches", "fingerprint", "encode", "sample")
)

TaskSpec = Annotated[PartConfig, TASKS]
"""A task by name (``text``) or as a mapping (``{type: mqar, num_pairs: 8}``)."""
