"""The loss and its gradients, and held-out scores: cross-entropy summed over labels, divided by their number.

    loss = sum over micro-batches, rows and labelled positions of -log p(label) / number of labelled positions

The division is by the count of the whole step, not per micro-batch, so accumulation changes nothing when micro-batches
have unequal numbers of labels. Held-out scores are means over all labelled positions too.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from statemix.tasks import IGNORE, Batch, Metric


def autocast(device: torch.device) -> AbstractContextManager[None]:
    """bfloat16 products on a GPU, float32 elsewhere; the parameters stay float32 either way."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy in nats, float32; ``logits`` [B, T, vocab], ``labels`` [B, T]."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def accumulate_gradients(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Add the gradients of one step to ``.grad``, one micro-batch after another; returns the mean loss."""
    device = batches[0].tokens.device
    num_valid = sum(batch.num_valid() for batch in batches)
    loss = torch.zeros((), device=device)
    for batch in batches:
        with autocast(device):
            logits, _ = model(batch.tokens)
        share = summed_loss(logits, batch.labels) / num_valid
        share.backward()
        loss += share.detach()
    return loss


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

    def score(self, metric: Metric) -> float:
        """The value of a metric."""
        return self.accuracy if metric.from_loss is None else metric.from_loss(self.loss)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], *, device: torch.device) -> Evaluation:
    """Score ``model`` on ``batches``. The model is left in the mode (train or eval) it came in.

    Raises:
        ValueError: there is no label.
    """
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
    if num_valid == 0:
        raise ValueError("training.task: expected held-out batches with a label to score, got none; draw some")
    return Evaluation(loss=loss / num_valid, accuracy=correct / num_valid, num_valid=num_valid)
