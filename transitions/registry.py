"""Transitions by name: what a recipe may write after ``transition:``.

A name, a mapping {type: name, option: value} or a list of those in the order of M_t. Names of papers are aliases: an
alias sets factors, gate formula and write, nothing else.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny
from pydantic_core import PydanticCustomError

from .module import FactorConfig, HeadSizes, ProductModule, TransitionModule

_MODULES: dict[str, type[TransitionModule]] = {}
# A validated Config builds the module it came from, even when a later class has taken over its name.
_MODULE_OF_CONFIG: dict[type[FactorConfig], type[TransitionModule]] = {}

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


def register(module: type[TransitionModule]) -> type[TransitionModule]:
    """Class decorator: let recipes name this module by the default of its ``Config.type``.

    A class of the same module takes over, such as that of a notebook cell or a changed file run again.

    Raises:
        ValueError: the name is taken.
    """
    name = module.Config.model_fields["type"].default
    taken = _MODULES.get(name)
    if name in ALIASES or (taken is not None and taken.__module__ != module.__module__):
        owner = f"{taken.__name__} of {taken.__module__}" if taken is not None else "an alias of the package"
        raise ValueError(f"{module.__name__}: expected a new name, got {name!r}, that of {owner}; rename the class")
    _MODULES[name] = module
    _MODULE_OF_CONFIG[module.Config] = module
    return module


def registered(name: str) -> type[TransitionModule] | None:
    """The module that a recipe gets for ``name``, None where there is none."""
    return _MODULES.get(name)


def transition_names() -> tuple[str, ...]:
    """Every name and alias."""
    return (*_MODULES, *ALIASES)


def build_transition(spec: tuple[FactorConfig, ...], sizes: HeadSizes) -> TransitionModule:
    """The module of a validated ``TransitionSpec``."""
    factors = [_MODULE_OF_CONFIG[type(config)](config, sizes) for config in spec]
    return factors[0] if len(factors) == 1 else ProductModule(factors)


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


def _config(factor: Any) -> FactorConfig:
    if isinstance(factor, FactorConfig):
        return factor
    name = factor.get("type") if isinstance(factor, Mapping) else factor
    if not isinstance(name, str) or name not in _MODULES:
        known = ", ".join(_MODULES if isinstance(name, str) and name in ALIASES else transition_names())
        raise PydanticCustomError(
            "transition_name", "expected one of {known}, got {got}", {"known": known, "got": repr(name)}
        )
    return _MODULES[name].Config.model_validate(factor)


TransitionSpec = Annotated[
    tuple[Annotated[SerializeAsAny[FactorConfig], BeforeValidator(_config)], ...], BeforeValidator(_factors)
]
