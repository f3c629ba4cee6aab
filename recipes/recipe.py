"""The recipe: what a model is made of and how it is trained, as one validated value."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Self

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, field_validator, model_validator
from torch import nn

from statemix.blocks import Block, CausalLM, build_mlp, build_norm
from statemix.mixers import build_mixer
from statemix.tasks import TASKS, Task

from .errors import Fault, Inconsistent, KeyPath, did_you_mean, one_of, shown
from .stack import LAYER_NAME, expand
from .training_config import TrainingConfig
from .yaml_text import to_text

LayerName = Annotated[str, StringConstraints(pattern=rf"^{LAYER_NAME}$")]


class ModelConfig(CausalLM.Config):
    """Sizes of the whole model."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    num_layers: int | None = Field(None, ge=1, description="must be the length of the stack; null = whatever that is")


def _only_names(stack: Any) -> Any:
    """Refuse anything but a text or a list of texts, item by item."""
    items = stack if isinstance(stack, list) else [stack]
    wrong = [index for index, item in enumerate(items) if not isinstance(item, str)]
    wanted = "a layer name or an expression such as (delta window)*2"
    if isinstance(stack, list) and wrong:
        raise Inconsistent([Fault((index,), f"expected {wanted}, got {shown(items[index])}") for index in wrong])
    if wrong:
        raise ValueError(f"expected {wanted}, or a list of those, got {shown(stack)}")
    return stack


def _refusal(make: Callable[[], nn.Module]) -> str:
    """What making a part on the meta device says against it; nothing where it can be made."""
    try:
        with torch.device("meta"):
            make()
    except ValueError as error:
        return str(error)
    except (RuntimeError, TypeError) as error:
        # torch's way to refuse a size beyond 64 bits.
        if "verflow" not in str(error):
            raise
        return "expected sizes that fit a machine; lower them"
    return ""


class Recipe(BaseModel):
    """A model and its training.

    ``stack`` names the layers in order; ``replace`` then puts named layers at single indices, counted from 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = Field(1, description="version of this format, 1")
    name: str = Field(min_length=1, description="what to call it")
    source: str = Field("", description="where it comes from: arXiv id and section")
    plugins: list[str] = Field(default=[], description="Python files with parts of your own, beside this file")
    model: ModelConfig = Field(description="sizes of the whole model, such as {vocab_size: 256, hidden_size: 128}")
    layers: dict[LayerName, Block.Config] = Field(
        min_length=1, description="named layers: {NAME: {mixer: ..., mlp: ...}}"
    )
    stack: Annotated[str | list[str], BeforeValidator(_only_names)] = Field(
        description="layer names in order, such as '(delta window)*12', or a list"
    )
    replace: dict[int, str] = Field(default={}, description="{index from 0: layer name}, on top of the stack")
    training: TrainingConfig = Field(default=TrainingConfig(), description="task, steps and optimiser")

    @property
    def layer_names(self) -> tuple[str, ...]:
        """One name a layer, from the first to the last."""
        names = expand(self.stack, tuple(self.layers))
        return tuple(self.replace.get(index, name) for index, name in enumerate(names))

    @property
    def layer_configs(self) -> tuple[Block.Config, ...]:
        """One config a layer, from the first to the last."""
        return tuple(self.layers[name] for name in self.layer_names)

    def build_task(self) -> Task:
        """Make the task; its data are read when they are asked for."""
        training = self.training
        sizes = {"vocab_size": self.model.vocab_size, "seq_len": training.seq_len, "seed": training.seed}
        return TASKS.class_of(training.task)(training.task, **sizes)

    def to_yaml(self) -> str:
        """Everything written out, defaults too, as YAML that loads to an equal recipe."""
        return to_text(self.model_dump())

    @field_validator("format")
    @classmethod
    def _is_known(cls, format: int) -> int:
        if format != 1:
            raise ValueError(f"expected 1, got {format}; a newer statemix may read this recipe")
        return format

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        faults = [*self._stack_faults(), *self._part_faults(), *self._task_faults()]
        if faults:
            raise Inconsistent(faults)
        return self

    def _stack_faults(self) -> list[Fault]:
        known = tuple(self.layers)
        faults = [
            Fault(("replace", index), f"unknown layer {name}; expected {one_of(known)}{did_you_mean(name, known)}")
            for index, name in self.replace.items()
            if name not in known
        ]
        try:
            num_layers = len(expand(self.stack, known))
        except Inconsistent as error:
            return [Fault(("stack", *fault.path), fault.message) for fault in error.faults] + faults
        faults += [
            Fault(
                ("replace", index),
                f"expected an index from 0 to {num_layers - 1} (the stack has {num_layers} layers), got {index}; "
                "the first layer is 0",
                at_key=True,
            )
            for index in self.replace
            if not 0 <= index < num_layers
        ]
        if self.model.num_layers not in (None, num_layers):
            message = (
                f"expected {num_layers}, the length of the stack, got {self.model.num_layers}; change one of the two"
            )
            faults.append(Fault(("model", "num_layers"), message))
        return faults

    def _part_faults(self) -> list[Fault]:
        """Sizes that do not go together, found by making each part without memory."""
        size, eps = self.model.hidden_size, self.model.norm_eps
        parts: dict[KeyPath, Callable[[], nn.Module]] = {
            ("model", "norm"): partial(build_norm, self.model.norm, size, eps=eps)
        }
        for name, layer in self.layers.items():
            parts["layers", name, "mixer"] = partial(build_mixer, layer.mixer, hidden_size=size, norm_eps=eps)
            if layer.mlp is not None:
                parts["layers", name, "mlp"] = partial(build_mlp, layer.mlp, hidden_size=size)
        refusals = ((path, _refusal(make)) for path, make in parts.items())
        return [Fault(path, message) for path, message in refusals if message]

    def _task_faults(self) -> list[Fault]:
        try:
            self.build_task().check()
        except ValueError as error:
            has_path = str(error).startswith(("training.", "model."))
            return [Fault(() if has_path else ("training", "task"), str(error))]
        return []
