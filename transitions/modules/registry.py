"""Transitions by name: what a recipe may write after ``transition:``.

A name, a mapping {type: name, option: value} or a list of those in the order of M_t. Names of papers are aliases: an
alias sets factors, gate formula and write, nothing else.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from statemix.plugins import Registry

from .module import FactorConfig, TransitionModule

_MAMBA2_GATE = {"type": "scalar_gate", "formula": "softplus"}

ALIASES: dict[str, list[dict[str, Any]]] = {
    "linear_attention": [{"type": "identity"}],
    "retnet": [{"type": "fixed_decay"}],
    "mamba2": [_MAMBA2_GATE | {"write": "dt"}],
    "gla": [{"type": "diagonal_gate", "formula": "logsigmoid", "rank": 16}],
    "deltanet": [{"type": "householder"}],
    "deltaproduct": [{"type": "householder", "count": 2, "max_beta": 2.0}],
    "gated_deltanet": [_MAMBA2_GATE, {"type": "householder"}],
    "gated_deltaproduct": [_MAMBA2_GATE, {"type": "householder", "count": 2, "max_beta": 2.0}],
    "kda": [{"type": "diagonal_gate", "formula": "softplus", "rank": None}, {"type": "householder"}],
}


TRANSITIONS: Registry[TransitionModule] = Registry("transition", aliases=ALIASES)
register = TRANSITIONS.register


def transition_names() -> tuple[str, ...]:
    """Every name and alias."""
    return TRANSITIONS.names()


def _factors(spec: Any) -> tuple[Any, ...]:
    """Names, aliases, mappings and lists of them as a flat tuple of mappings."""
    if isinstance(spec, str):
        return tuple(ALIASES.get(spec, [{"type": spec}]))
    if isinstance(spec, Mapping) and list(spec) == ["type"] and isinstance(spec["type"], str):
        return _factors(spec["type"]) if spec["type"] in ALIASES else (spec,)
    if isinstance(spec, Mapping | FactorConfig):
        return (spec,)
    if isinstance(spec, list | tuple) and spec:
        return tuple(factor for item in spec for factor in _factors(item))
    raise PydanticCustomError(
        "transition", "expected a name, a mapping with 'type', or a list of those, got {got}", {"got": repr(spec)}
    )


TransitionSpec = Annotated[tuple[Annotated[FactorConfig, TRANSITIONS], ...], BeforeValidator(_factors)]
