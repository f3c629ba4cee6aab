"""Where the time of a training step goes: a table of the costliest operators by layer, and a trace for TensorBoard.

An operator of the forward pass belongs to the layer whose module runs it; one of the backward pass belongs to the layer
of the forward operator it is the derivative of, which autograd numbers alike (``sequence_nr``).
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

from statemix.recipes import Recipe

from .run_plan import plan_run
from .trainer import Trainer

LAYER = "layer: "
BACKWARD = "autograd::engine::evaluate_function: "
OUTSIDE = "optimizer and rest"


@dataclass(frozen=True)
class OperatorCost:
    """Time of one operator in one layer, in milliseconds a step; ``calls`` a step."""

    layer: str
    operator: str
    is_backward: bool
    calls: float
    milliseconds: float


@dataclass(frozen=True)
class Profile:
    """A profiled recipe: its costs, dearest first, and the folder that holds the trace."""

    name: str
    device: str
    costs: tuple[OperatorCost, ...]
    folder: Path

    @property
    def milliseconds(self) -> float:
        """Time in operators, a step."""
        return sum(cost.milliseconds for cost in self.costs)

    def table(self, rows: int = 20) -> str:
        """The dearest operators and, below, the time of each layer."""
        whole = self.milliseconds or 1.0
        lines = [f"{'layer':<24}{'operator':<40}{'pass':<10}{'calls':>8}{'ms':>10}{'share':>8}"]
        for cost in self.costs[:rows]:
            direction = "backward" if cost.is_backward else "forward"
            share = f"{100 * cost.milliseconds / whole:.1f}%"
            lines.append(
                f"{cost.layer:<24}{cost.operator[:38]:<40}{direction:<10}"
                f"{cost.calls:>8.0f}{cost.milliseconds:>10.2f}{share:>8}"
            )
        layers: dict[str, float] = defaultdict(float)
        for cost in self.costs:
            layers[cost.layer] += cost.milliseconds
        lines += ["", f"{'layer':<24}{'ms a step':>10}{'share':>8}"]
        for layer, milliseconds in sorted(layers.items(), key=lambda item: -item[1]):
            lines.append(f"{layer:<24}{milliseconds:>10.2f}{f'{100 * milliseconds / whole:.1f}%':>8}")
        lines.append(f"{self.name}: {whole:.1f} ms in operators a step on {self.device}")
        return "\n".join([*lines, f"trace: tensorboard --logdir {self.folder}"])


def profile_training(
    recipe: Recipe, out: str | Path, *, steps: int = 3, device: str | torch.device | None = None
) -> Profile:
    """Train a few steps under torch.profiler, after one that is not counted.

    Args:
        out: a new or empty folder for the trace.
        steps: profiled steps.
        device: None takes a GPU when there is one.

    Raises:
        ValueError: bad folder, recipe, data or device; nothing has been written.
    """
    if steps < 1:
        raise ValueError(f"steps: expected at least 1, got {steps}")
    plan = plan_run(recipe, out, resume=False, stop_after=None, device=device)
    trainer = Trainer(plan)
    trainer.advance()
    on_gpu = plan.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    plan.folder.mkdir(parents=True, exist_ok=True)
    with _named_layers(trainer.model), profile(activities=activities, acc_events=True) as profiler:
        for _ in range(steps):
            trainer.advance()
    tensorboard_trace_handler(str(plan.folder), worker_name=recipe.name)(profiler)
    costs = _costs(profiler.events(), steps, on_gpu=on_gpu)
    return Profile(recipe.name, str(plan.device), costs, plan.folder)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The parts a table tells apart: embedding, mixer and MLP of each block, final norm and head."""
    named = dict(model.named_modules())
    parts = [name for name in named if name.count(".") == 2 and name.startswith("blocks.")]
    return {name: named[name] for name in ("embedding", *parts, "norm", "head") if name in named}


@contextmanager
def _named_layers(model: nn.Module) -> Iterator[None]:
    """While inside, the profiler sees a range ``layer: NAME`` around each part of the model."""
    opened: list[Any] = []

    def open_range(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any) -> None:
            opened.append(record_function(LAYER + name))
            opened[-1].__enter__()

        return hook

    def close_range(module: nn.Module, arguments: Any, result: Any) -> None:
        opened.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for name, module in layers_of(model).items():
            hooks.callback(module.register_forward_pre_hook(open_range(name)).remove)
            hooks.callback(module.register_forward_hook(close_range).remove)
        yield


def _costs(events: Any, steps: int, *, on_gpu: bool) -> tuple[OperatorCost, ...]:
    """Self time of every operator, summed by layer and pass."""
    layer_of_sequence = {
        event.sequence_nr: layer
        for event in events
        if event.sequence_nr >= 0 and not _is_backward(event) and (layer := _forward_layer(event))
    }
    spent: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for event in events:
        if event.device_type.name != "CPU":
            continue  # a GPU kernel: its time is that of the operator that launched it
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.name.startswith((LAYER, BACKWARD)) or not microseconds:
            continue
        above = _backward_ancestor(event)
        layer = _forward_layer(event) if above is None else layer_of_sequence.get(above.sequence_nr)
        spent[layer or OUTSIDE, event.name, above is not None].append(microseconds)
    costs = (
        OperatorCost(layer, name, is_backward, len(times) / steps, sum(times) / steps / 1e3)
        for (layer, name, is_backward), times in spent.items()
    )
    return tuple(sorted(costs, key=lambda cost: -cost.milliseconds))


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _forward_layer(event: Any) -> str | None:
    return next((e.name.removeprefix(LAYER) for e in _ancestors(event) if e.name.startswith(LAYER)), None)


def _backward_ancestor(event: Any) -> Any:
    return next((e for e in _ancestors(event) if e.name.startswith(BACKWARD)), None)


def _is_backward(event: Any) -> bool:
    return _backward_ancestor(event) is not None
