"""Overrides: ``layers.delta.mixer.num_heads=8`` changes one value of a recipe, ``stack.3=window`` one item of a list.

The value is YAML, read as in a file. It replaces what is there, whole mappings and lists too; keys that the recipe
leaves at their defaults can be set as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter

from statemix.transitions import TransitionSpec, transition_names

from .errors import KeyPath, RecipeError, did_you_mean, dotted, one_of, shown
from .known_keys import annotations_at, fields_at, type_names, value_at
from .marked_yaml import YamlError, read_yaml

_transition: TypeAdapter[Any] = TypeAdapter(TransitionSpec)


def apply_overrides(
    data: dict[Any, Any], overrides: Sequence[str], schema: type[BaseModel]
) -> list[tuple[KeyPath, str]]:
    """Change ``data`` in place, later overrides last; returns the key path and the text of each.

    Raises:
        RecipeError: not of the form key=value, a value that is not YAML, or a path that leads nowhere.
    """
    if isinstance(overrides, str):
        raise RecipeError(
            f"overrides: expected a list of 'key=value', got the text '{overrides}'; write ['{overrides}']"
        )
    return [(_apply(data, text, schema), text) for text in overrides]


def _apply(data: dict[Any, Any], text: str, schema: type[BaseModel]) -> KeyPath:
    place, equals, written = text.partition("=")
    segments = place.strip().split(".")
    if not equals or not all(segments):
        raise RecipeError(f"override {text}: expected key.path=value, such as training.steps=100")
    if not written.strip():
        raise RecipeError(f"override {text}: expected a value after '='; write null for none")
    try:
        value = read_yaml(written).data
    except YamlError as error:
        raise RecipeError(f"override {text}: {error}") from None
    path: KeyPath = ()
    for depth, segment in enumerate(segments):
        container = value_at(data, path)
        key = _key(container, segment, path, text)
        path = (*path, key)
        if depth == len(segments) - 1:
            container[key] = value
        else:
            container[key] = _opened(data, path, text, segments[depth + 1 :], written, schema)
    return path


def _key(container: Any, segment: str, path: KeyPath, text: str) -> Any:
    if isinstance(container, list):
        if not segment.isdecimal() or int(segment) >= len(container):
            raise RecipeError(
                f"override {text}: {dotted(path)}: expected an index from 0 to {len(container) - 1}, got {segment}; "
                f"to change the length, give the whole list: {dotted(path)}=[...]"
            )
        return int(segment)
    is_number = segment.removeprefix("-").isdecimal()
    return int(segment) if is_number and segment not in container else segment


def _opened(
    data: dict[Any, Any], path: KeyPath, text: str, rest: Sequence[str], written: str, schema: type[BaseModel]
) -> Any:
    """The mapping or list at ``path``, ready for a change inside: defaults are written out, names become mappings."""
    parent, key = path[:-1], path[-1]
    container = value_at(data, parent)
    if key not in container and not isinstance(container, list):
        fields = fields_at(schema, data, parent)
        if key not in fields:
            known = tuple(fields or container)
            raise RecipeError(
                f"override {text}: {dotted(path)}: unknown key; expected {one_of(known)}{did_you_mean(key, known)}"
            )
        return _written_out(fields[key].get_default(call_default_factory=True), text, path)
    value = container[key]
    if isinstance(value, Mapping | list):
        return value
    if isinstance(value, str) and any(value in type_names(found) for found in annotations_at(schema, data, path)):
        return {"type": value}
    if key == "transition" and value in transition_names():
        factors = _transition.dump_python(_transition.validate_python(value))
        return list(factors) if len(factors) > 1 else factors[0]
    named = f"type: {value}, " if isinstance(value, str) else ""
    inner = f"{{{named}" + "".join(f"{name}: {{" for name in rest[:-1]) + f"{rest[-1]}: {written}" + "}" * len(rest)
    raise RecipeError(
        f"override {text}: {dotted(path)} is {shown(value)}, which has nothing inside; "
        + (f"use replace.{rest[0]}={written}" if path == ("stack",) else f"set it as a whole: {dotted(path)}={inner}")
    )


def _written_out(default: Any, text: str, path: KeyPath) -> Any:
    if isinstance(default, BaseModel):
        return default.model_dump()
    if isinstance(default, list | tuple | dict):
        return dict(default) if isinstance(default, dict) else list(default)
    if default is None:
        raise RecipeError(f"override {text}: {dotted(path)} is null; set it as a whole: {dotted(path)}={{...}}")
    return {}
