"""Held-out scores: mean loss, bits per byte, accuracy at the labelled positions."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .batch import IGNORE, Batch
from .objective import autocast, summed_loss


@dataclass(frozen=True)
class Evaluation:
    """Means over ``num_valid`` labelled positions.

    Attributes:
        loss: cross-entropy in nats.
        accuracy: share of positions whose most likely token is the label, 0 to 1.
        num_valid: number of positions.
    """

    loss: float
    accuracy: float
    num_valid: int

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits, when tokens are bytes."""
        return self.loss / math.log(2)

    def score(self, metric: str) -> float:
        """The value of ``bits_per_byte`` or ``accuracy``."""
        return self.bits_per_byte if metric == "bits_per_byte" else self.accuracy


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], *, device: torch.device) -> Evaluation:
    """Score ``model`` on ``batches``. The model is left in the mode (train or eval) it came in."""
    was_training = model.training
    model.eval()
    loss, correct, num_valid = 0.0, 0, 0
    for batch in (batch.to(device) for batch in batches):
        with autocast(device):
            logits, _ = model(batch.tokens)
        loss += summed_loss(logits, batch.labels).item()
        asked = batch.labels != IGNORE
        correct += int((logits.argmax(-1) == batch.labels)[asked].sum())
        num_valid += int(asked.sum())
    model.train(was_training)
    return Evaluation(loss=loss / num_valid, accuracy=correct / num_valid, num_valid=num_valid)
