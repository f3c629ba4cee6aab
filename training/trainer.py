"""One model in training: a step draws its batch, adds up the gradients, clips, and moves the parameters."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from statemix.recipes import Recipe, build

from .nonfinite import NonFiniteError, first_nonfinite_layer, first_nonfinite_parameter
from .objective import accumulate_gradients
from .optimizer import build_optimizer, learning_rate
from .run_plan import RunPlan
from .run_state import restore, save_checkpoint


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did; ``loss`` is the mean over its labelled positions, before the update."""

    loss: float
    lr: float
    grad_norm: float


class Trainer:
    """Model, optimizer and position of a run.

    Attributes:
        step: steps taken so far. It is the data position too: the batch of a step depends on nothing else.
        saved_step: step of the newest checkpoint, None before the first.
    """

    def __init__(self, plan: RunPlan) -> None:
        # torch 2.13 on some CPUs: the first vectorised exp after matrix products on two threads has come out slightly
        # wrong (3e-9 in float64 in 15 of 54 processes), and a resumed run must not differ. A small exp before cures it.
        torch.zeros(4).exp()
        self.plan = plan
        self.recipe: Recipe = plan.recipe
        torch.manual_seed(self.recipe.training.seed)
        self.model = build(self.recipe).to(plan.device)
        self.optimizer = build_optimizer(self.model, self.recipe.training)
        self.step = plan.start
        self.saved_step: int | None = None
        if plan.state is not None:
            restore(plan.state, plan.folder, recipe=self.recipe, model=self.model, optimizer=self.optimizer)
            self.saved_step = self.step

    def advance(self) -> StepRecord:
        """Take one step.

        Raises:
            NonFiniteError: the loss or a gradient is nan or inf; the parameters are left as they were.
        """
        training = self.recipe.training
        step = self.step + 1
        # Drawn whole, then cut: accumulation changes the memory a step needs, not what it learns from.
        batch = self.plan.task.train_batch(step, training.batch_size * training.accumulate)
        batches = batch.to(self.plan.device).split(training.batch_size)
        self.optimizer.zero_grad()
        loss = accumulate_gradients(self.model, batches).item()
        parameters = list(self.model.parameters())
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        grad_norm = norm.item()
        # Before clipping, which would spread one nan to every gradient.
        for quantity, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                place = first_nonfinite_layer(self.model, batches)
                raise NonFiniteError(f"step {step}: {quantity} is {value}; first non-finite value in {place}")
        if training.clip > 0:
            nn.utils.clip_grads_with_norm_(parameters, training.clip, norm)
        lr = learning_rate(step, training)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.step = step
        return StepRecord(loss=loss, lr=lr, grad_norm=grad_norm)

    def save(self) -> None:
        """Write a checkpoint of this step, unless the newest one is of this step already.

        Raises:
            NonFiniteError: a parameter is nan or inf, so the checkpoint before is the better one to keep.
        """
        if self.saved_step == self.step:
            return
        name = first_nonfinite_parameter(self.model)
        if name is not None:
            raise NonFiniteError(f"step {self.step}: the update left a non-finite value in {name} (parameter)")
        save_checkpoint(
            self.plan.folder,
            recipe=self.recipe,
            model=self.model,
            optimizer=self.optimizer,
            step=self.step,
            data=self.plan.data,
        )
        self.saved_step = self.step
