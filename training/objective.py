"""The loss and its gradients: cross-entropy summed over positions with a label, divided by their number.

    loss = sum over micro-batches, rows and labelled positions of -log p(label) / number of labelled positions

The division is by the count of the whole step, not per micro-batch, so accumulation changes nothing when micro-batches
have unequal numbers of labels.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch import IGNORE, Batch


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
