"""What a task gives the loop, and the task of a recipe."""

from collections.abc import Iterator
from typing import Protocol

from statemix.recipes import Recipe, TextTask

from .batch import Batch
from .byte_text import ByteText, read_text
from .mqar import Mqar


class Task(Protocol):
    """Batches by step, held-out batches, and the name of the score: ``bits_per_byte`` or ``accuracy``."""

    metric: str

    def train_batch(self, step: int, batch_size: int) -> Batch: ...

    def heldout_batches(self, num_batches: int, batch_size: int) -> Iterator[Batch]: ...

    def fingerprint(self) -> str: ...


def build_task(recipe: Recipe) -> Task:
    """Make the data source of a recipe; reads the text.

    Raises:
        ValueError: the folder has no text.
    """
    training = recipe.training
    task = training.task
    if isinstance(task, TextTask):
        text = read_text(task.folder, window=training.seq_len + 1)
        return ByteText(text, seq_len=training.seq_len, seed=training.seed)
    return Mqar(
        num_pairs=task.num_pairs,
        power=task.power,
        random_non_queries=task.random_non_queries,
        vocab_size=recipe.model.vocab_size,
        seq_len=training.seq_len,
        seed=training.seed,
    )
