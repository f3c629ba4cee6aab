"""States as the checks see them: any value whose tensors have one entry a sequence along their first axis."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def state_tensors(state: Any, name: str = "state") -> dict[str, Tensor]:
    """Every tensor inside a state, by name: of fields, mappings and sequences, however nested."""
    if isinstance(state, Tensor):
        return {name: state}
    if isinstance(state, Mapping):
        parts = [(f"{name}[{key!r}]", value) for key, value in state.items()]
    elif isinstance(state, tuple | list):
        parts = [(f"{name}[{i}]", value) for i, value in enumerate(state)]
    elif is_dataclass(state):
        parts = [(f"{name}.{field.name}", getattr(state, field.name)) for field in fields(state)]
    else:
        parts = [(f"{name}.{key}", value) for key, value in getattr(state, "__dict__", {}).items()]
    return {inner: tensor for part, value in parts for inner, tensor in state_tensors(value, part).items()}


def select(state: Any, index: Tensor | Sequence[int]) -> Any:
    """Sequences ``index`` of a state: by its own ``select`` if it has one, else of every field of a dataclass."""
    if isinstance(state, Tensor):
        return state[torch.as_tensor(index, device=state.device)]
    if hasattr(state, "select"):
        return state.select(index)
    return replace(state, **{field.name: select(getattr(state, field.name), index) for field in fields(state)})


def can_select(state: Any) -> bool:
    """Whether ``select`` can pick sequences of a state."""
    if callable(getattr(state, "select", None)) or isinstance(state, Tensor):
        return True
    return is_dataclass(state) and all(can_select(getattr(state, field.name)) for field in fields(state))
