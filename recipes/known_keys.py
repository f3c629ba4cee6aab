"""Which keys a recipe may have at a key path, read off the annotations of the models that validate it."""

from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from statemix.plugins import Registry

from .errors import KeyPath


def value_at(data: Any, path: KeyPath) -> Any:
    """The value at ``path``, or None where the path leaves the data."""
    for key in path:
        if isinstance(data, Mapping) and key in data:
            data = data[key]
        elif isinstance(data, list | tuple) and isinstance(key, int) and 0 <= key < len(data):
            data = data[key]
        else:
            return None
    return data


def annotations_at(root: Any, data: Any, path: KeyPath) -> list[Any]:
    """The types that may describe the value at ``path``; several inside a union whose ``type`` is not known."""
    annotations = [root]
    for depth, key in enumerate(path):
        value = value_at(data, path[:depth])
        annotations = [child for parent in annotations for child in _children(parent, value, key)]
    return annotations


def fields_at(root: Any, data: Any, path: KeyPath) -> dict[str, FieldInfo]:
    """The keys that the mapping at ``path`` may have; empty where any key goes."""
    value = value_at(data, path)
    return {
        name: field
        for annotation in annotations_at(root, data, path)
        for model in _models(annotation, value)
        for name, field in model.model_fields.items()
    }


def type_names(annotation: Any) -> list[str]:
    """The values that ``type`` may have in the members of a union."""
    return [name for model in _all_models(annotation) for name in _type_literals(model)]


def paths_to(root: Any, data: Any, path: KeyPath, key: str) -> list[KeyPath]:
    """Key paths below ``path`` that end in ``key``; the shortest first, then those that are not set yet."""
    value = value_at(data, path)
    below = {found for annotation in annotations_at(root, data, path) for found in _below(annotation, value, key, ())}
    return [(*path, *found) for found in sorted(below, key=lambda at: (len(at), value_at(value, at) is not None, at))]


def _leaves(annotation: Any) -> Iterator[Any]:
    """The members of a union, without Annotated and None; a registry for a field that takes whatever is in it."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *notes = get_args(annotation)
        registry = next((note for note in notes if isinstance(note, Registry)), None)
        yield from _leaves(inner) if registry is None else [registry]
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _leaves(member)
    elif annotation is not NoneType:
        yield annotation


def _all_models(annotation: Any) -> list[type[BaseModel]]:
    """Models that a mapping may become here; one mapping may stand for a list of one."""
    models: list[type[BaseModel]] = []
    for leaf in _leaves(annotation):
        if get_origin(leaf) in (list, tuple):
            models += [model for item in _items(leaf) for model in _all_models(item)]
        elif isinstance(leaf, Registry):
            models += leaf.configs()
        elif isinstance(leaf, type) and issubclass(leaf, BaseModel):
            models.append(leaf)
    return models


def _models(annotation: Any, value: Any) -> list[type[BaseModel]]:
    """The models that ``value`` may become, by its ``type``; all of them when that names none."""
    models = _all_models(annotation)
    named = value.get("type") if isinstance(value, Mapping) else None
    chosen = [model for model in models if not _type_literals(model) or named in _type_literals(model)]
    return chosen or models


def _type_literals(model: type[BaseModel]) -> tuple[str, ...]:
    field = model.model_fields.get("type")
    return get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()


def _items(sequence: Any) -> list[Any]:
    return [item for item in get_args(sequence) if item is not Ellipsis]


def _children(annotation: Any, value: Any, key: Any) -> Iterator[Any]:
    for model in _models(annotation, value):
        if not isinstance(value, list | tuple) and key in model.model_fields:
            yield model.model_fields[key].rebuild_annotation()
    for leaf in _leaves(annotation):
        if get_origin(leaf) is dict:
            yield get_args(leaf)[1]
        elif get_origin(leaf) in (list, tuple) and isinstance(value, list | tuple):
            yield from _items(leaf)


def _below(annotation: Any, value: Any, key: str, above: tuple[type[BaseModel], ...]) -> Iterator[KeyPath]:
    for model in _models(annotation, value):
        # Transitions may hold transitions.
        if model in above:
            continue
        for name, field in model.model_fields.items():
            if name == key:
                yield (name,)
            inner = value_at(value, (name,))
            yield from ((name, *path) for path in _below(field.rebuild_annotation(), inner, key, (*above, model)))
    for leaf in _leaves(annotation):
        if get_origin(leaf) is dict:
            yield from (("NAME", *path) for path in _below(get_args(leaf)[1], None, key, above))
