"""AdamW with the usual groups, and its learning rate: linear warm-up, then cosine to min_lr_ratio * lr.

lr(s) = lr * s / W                                              s = 1 .. W (warmup_steps)
lr(s) = lr * (r + (1 - r) (1 + cos(pi (s - W) / (N - W))) / 2)  s = W + 1 .. N (steps), r = min_lr_ratio
"""

import math

import torch
from torch import nn

from statemix.mixers import ShortConvolution
from statemix.recipes import TrainingConfig
from statemix.transitions import TransitionModule


def decayed(model: nn.Module) -> dict[str, bool]:
    """Whether each parameter takes weight decay, by name; a tied weight appears once.

    Matrices do. Left out are norms and biases (everything 1-d), whatever carries ``no_weight_decay = True``, all that
    makes a transition (gates, beta, A_log, dt_bias: decay would pull the forgetting towards a constant), convolutions,
    and embeddings (a row is trained only when its token occurs, and decay would shrink it at every step; a tied head is
    the embedding).
    """
    kept: set[int] = set()
    for module in model.modules():
        if isinstance(module, TransitionModule | ShortConvolution | nn.Embedding):
            kept.update(id(parameter) for parameter in module.parameters())
    return {
        name: not (parameter.ndim < 2 or getattr(parameter, "no_weight_decay", False) or id(parameter) in kept)
        for name, parameter in model.named_parameters()
    }


def build_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over two groups, with and without weight decay; each parameter is in exactly one."""
    takes_decay = decayed(model)
    parameters = dict(model.named_parameters())
    with_decay = [parameters[name] for name, takes in takes_decay.items() if takes]
    without = [parameters[name] for name, takes in takes_decay.items() if not takes]
    groups = [{"params": with_decay, "weight_decay": training.weight_decay}, {"params": without, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=training.lr, betas=training.betas, fused=True)


def learning_rate(step: int, training: TrainingConfig) -> float:
    """Learning rate of step 1 .. steps."""
    if step <= training.warmup_steps:
        return training.lr * step / training.warmup_steps
    progress = (step - training.warmup_steps) / (training.steps - training.warmup_steps)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return training.lr * (training.min_lr_ratio + (1 - training.min_lr_ratio) * cosine)
