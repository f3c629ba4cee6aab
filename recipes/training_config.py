"""The ``training:`` section of a recipe: what to train on, for how long, and with which optimiser settings."""

from typing import Annotated, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from statemix.tasks import ByteText, TaskSpec

Beta = Annotated[float, Field(ge=0, lt=1)]
# Strict validation knows no tuple in YAML.
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(lambda betas: tuple(betas) if isinstance(betas, list) else betas)]


class TrainingConfig(BaseModel):
    """AdamW with linear warm-up and cosine decay, on one task."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    task: TaskSpec = Field(
        default=ByteText.Config(), description="text, or a mapping such as {type: mqar, num_pairs: 8}"
    )
    seq_len: int = Field(256, ge=1, description="tokens a sequence")
    batch_size: int = Field(8, ge=1, description="sequences a forward pass")
    steps: int = Field(1000, ge=1, description="optimiser steps")
    lr: float = Field(1e-3, gt=0, description="peak learning rate, reached at the end of the warm-up")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="final learning rate / lr (cosine decay), 0 to 1")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up from 0; at most steps")
    weight_decay: float = Field(0.1, ge=0, description="AdamW decay of matrices; norms, biases, gates, convolutions: 0")
    betas: Betas = Field((0.9, 0.95), description="AdamW moments, each in [0, 1)")
    clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0 = no clipping")
    accumulate: int = Field(1, ge=1, description="forward passes an optimiser step, weighted by valid tokens")
    checkpoint_every: int = Field(1000, ge=1, description="steps between checkpoints; the last step always has one")
    log_every: int = Field(10, ge=1, description="steps between lines of metrics.jsonl")
    eval_batches: int = Field(16, ge=1, description="held-out batches in an evaluation")
    seed: int = Field(0, ge=0, lt=2**63, description="of the weights and of the order of the data")

    @model_validator(mode="after")
    def _warmup_ends_in_time(self) -> Self:
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps: expected at most steps = {self.steps}, got {self.warmup_steps}; "
                "lower warmup_steps or raise steps"
            )
        return self
