"""Find the first layer with a non-finite value, after a step whose loss or gradient was not finite."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from statemix.tasks import Batch

from .objective import autocast


class NonFiniteError(RuntimeError):
    """A loss, gradient or parameter became nan or inf; the message names the step and the layer."""


class _Found(Exception):
    """Leaves the forward pass at the first non-finite value."""


def first_nonfinite_layer(model: nn.Module, batches: Sequence[Batch]) -> str:
    """Run the forward passes again and name the first module, in the order of execution, with a non-finite value.

    A module's own parameters are looked at before its output, inner modules before the ones around them. When every
    forward value is finite the gradients of the step are named instead, from the loss backwards.
    """
    name = _first_in_forward(model, batches)
    return name or _first_in_gradients(model) or "the norm of all gradients, which overflows although each is finite"


def first_nonfinite_parameter(model: nn.Module) -> str | None:
    """The first parameter that holds nan or inf."""
    return next((name for name, parameter in model.named_parameters() if not parameter.isfinite().all()), None)


def _first_in_forward(model: nn.Module, batches: Sequence[Batch]) -> str | None:
    names = {module: name or "model" for name, module in model.named_modules()}

    def look_at_parameters(module: nn.Module, args: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.isfinite().all():
                raise _Found(f"{names[module]}.{name} (parameter)")

    def look_at_output(module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and not first.isfinite().all():
            raise _Found(f"{names[module]} (output)")

    handles = [module.register_forward_pre_hook(look_at_parameters) for module in names]
    handles += [module.register_forward_hook(look_at_output) for module in names]
    try:
        with torch.no_grad(), autocast(batches[0].tokens.device):
            for batch in batches:
                model(batch.tokens)
    except _Found as found:
        return str(found)
    finally:
        for handle in handles:
            handle.remove()
    return None


def _first_in_gradients(model: nn.Module) -> str | None:
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            return f"{name} (gradient)"
    return None
