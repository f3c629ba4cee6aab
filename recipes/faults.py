"""What pydantic found wrong, in the words of the recipe: key path, expected, got, what to do."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from statemix.blocks import Block
from statemix.transitions import transition_names

from .errors import Fault, Inconsistent, KeyPath, did_you_mean, dotted, nearest, one_of, shown
from .known_keys import annotations_at, fields_at, paths_to, type_names, value_at
from .plain_scalar import plain_scalar

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "string_too_short": "a text of {min_length} or more letters",
    "string_pattern_mismatch": "a name of letters, digits, _ and -, starting with a letter",
    "too_short": "{min_length} or more entries",
    "too_long": "{max_length} or fewer entries",
}
_QUOTED = re.compile(r"'([^']*)'")
_LEADING_PATH = re.compile(r"((?:\w|-)+(?:\.(?:\w|-)+)*): ")


def faults_of(error: ValidationError, data: Any, schema: type[BaseModel]) -> list[Fault]:
    """What is wrong with ``data``, which ``schema`` refused with ``error``; each fault once."""
    details = error.errors(include_url=False)
    misspelt = {
        (*path[:-1], nearest(path[-1], fields_at(schema, data, path[:-1])))
        for path in (_data_path(entry, data)[0] for entry in details if entry["type"] == "extra_forbidden")
    }
    found = [fault for entry in details for fault in _faults(entry, data, schema)]
    missing = {_data_path(entry, data)[0] for entry in details if entry["type"] == "missing"}
    return [fault for fault in dict.fromkeys(found) if fault.path not in missing & misspelt]


def _faults(details: ErrorDetails, data: Any, schema: type[BaseModel]) -> list[Fault]:
    path, at_key = _data_path(details, data)
    context = details.get("ctx", {})
    if _is_part_of_a_layer(path, data):
        return [Fault(path[:2], _belongs_in_a_layer(path[1], data), at_key=True)]
    match details["type"]:
        case "extra_forbidden" | "invalid_key":
            return [Fault(path, _unknown_key(path, data, schema), at_key=True)]
        case "missing":
            return [Fault(path, _missing_key(path, data, schema))]
        case "value_error":
            return _from_validator(path, context["error"], data, schema)
        case "unknown_part" if "type" not in _mapping_at(path, data):
            return [Fault((*path, "type"), _missing_type(path, data, schema))]
        case "unknown_part":
            name, known = _mapping_at(path, data)["type"], context["known"].split(", ")
            inside = path if value_at(data, path) == name else (*path, "type")
            way_out = _as_transition(path, name) or _as_own(context["kind"], name, known)
            return [Fault(inside, _wanted(known, name) + way_out)]
        case _:
            return [Fault(path, _wrong_value(details), at_key=at_key)]


def _mapping_at(path: KeyPath, data: Any) -> Mapping[Any, Any]:
    """The mapping at ``path``; for anything else one that seems to have a ``type``."""
    value = value_at(data, path)
    return value if isinstance(value, Mapping) else {"type": value}


def _is_part_of_a_layer(path: KeyPath, data: Any) -> bool:
    """``layers.mixer``, which should have been ``layers.NAME.mixer``."""
    is_named_like_one = path[:1] == ("layers",) and path[1:2] in [(name,) for name in Block.Config.model_fields]
    return is_named_like_one and "mixer" not in _mapping_at(path[:2], data)


def _belongs_in_a_layer(part: str, data: Any) -> str:
    layers = [name for name, layer in data["layers"].items() if isinstance(layer, Mapping) and part not in layer]
    layer = next((name for name in layers if name not in Block.Config.model_fields), "NAME")
    return f"belongs inside a layer; did you mean layers.{layer}.{part}?"


def _data_path(details: ErrorDetails, data: Any) -> tuple[KeyPath, bool]:
    """The key path of an error: its location without the names of union members; and whether a key is at fault."""
    location = details["loc"]
    if location[-1:] == ("[key]",):
        # pydantic spells such a key its own way: True becomes 1.
        return (*location[:-2], details["input"]), True
    path: KeyPath = ()
    for depth, key in enumerate(location):
        container = value_at(data, path)
        holds_it = key in container if isinstance(container, Mapping) else isinstance(container, list | tuple)
        if holds_it or (details["type"] == "missing" and depth == len(location) - 1):
            path = (*path, key)
    return path, False


def _unknown_key(path: KeyPath, data: Any, schema: type[BaseModel]) -> str:
    *parent, key = path
    known = list(fields_at(schema, data, tuple(parent)))
    elsewhere = [found for found in paths_to(schema, data, tuple(parent), str(key)) if len(found) > len(path)]
    if isinstance(value_at(data, path), Mapping) and "mixer" in value_at(data, path):
        hint = f"; did you mean layers.{key}?"
    elif isinstance(key, int):
        hint = f"; did you mean replace.{key}?"
    elif elsewhere:
        hint = f"; did you mean {dotted(elsewhere[0])}?"
    else:
        hint = did_you_mean(key, known)
    return f"unknown key; expected {one_of(known) if known else 'no keys'}{hint}"


def _missing_key(path: KeyPath, data: Any, schema: type[BaseModel]) -> str:
    parent, key = path[:-1], path[-1]
    field = fields_at(schema, data, parent).get(key)
    meaning = f" ({field.description})" if field and field.description else ""
    return f"missing key{meaning}{_strays(parent, key, data, schema) or '; add it'}"


def _missing_type(path: KeyPath, data: Any, schema: type[BaseModel]) -> str:
    names = [name for found in annotations_at(schema, data, path) for name in type_names(found)]
    unknown = [key for key in value_at(data, path) if key not in fields_at(schema, data, path)]
    close = nearest("type", unknown)
    way_out = f"; rename {close} to type" if close else _strays(path, "type", data, schema) or "; add it"
    return f"missing key; expected {one_of(names)}{way_out}"


def _strays(parent: KeyPath, key: str, data: Any, schema: type[BaseModel]) -> str:
    """Where a missing key is found instead: further up, where it means nothing."""
    for depth in range(len(parent) - 1, -1, -1):
        above = parent[:depth]
        container = value_at(data, above)
        if isinstance(container, Mapping) and key in container and key not in fields_at(schema, data, above):
            return f"; {dotted((*above, key))} is one place too far up, move it here"
    return ""


def _from_validator(path: KeyPath, error: Exception, data: Any, schema: type[BaseModel]) -> list[Fault]:
    """Our validators raise ``key: expected ..., got ...; ...`` with the key relative to where they run."""
    if isinstance(error, Inconsistent):
        found = [Fault((*path, *fault.path), fault.message, fault.at_key) for fault in error.faults]
    else:
        found = [Fault(path, str(error))]
    return [_narrowed(fault, data, schema) for fault in found]


def _narrowed(fault: Fault, data: Any, schema: type[BaseModel]) -> Fault:
    """The same fault at the key that its message begins with."""
    leading = _LEADING_PATH.match(fault.message)
    if not leading or leading[1].split(".")[0] not in fields_at(schema, data, fault.path):
        return fault
    return Fault((*fault.path, *leading[1].split(".")), fault.message[leading.end() :])


def _wanted(names: list[str], got: object) -> str:
    return f"expected {one_of(names)}, got {shown(got)}{did_you_mean(got, names)}"


def _as_transition(path: KeyPath, got: object) -> str:
    is_one = path[-1:] == ("mixer",) and got in transition_names()
    return f"; {got} is a transition: {{type: state, transition: {got}, ...}}" if is_one else ""


def _as_own(kind: str, name: object, known: Sequence[str]) -> str:
    is_misspelt = get_close_matches(str(name), known, cutoff=0.75)
    return "" if is_misspelt else f"; for your own {kind} name its file under plugins, or with --plugin"


def _wrong_value(details: ErrorDetails) -> str:
    kind, got, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "literal_error":
        return _wanted(_QUOTED.findall(context["expected"]) or [context["expected"]], got)
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind].format(**context)}, got {shown(got)}{_way_out(kind, got)}"
    return details["msg"]


def _way_out(kind: str, got: object) -> str:
    match kind, got:
        case "int_type", float() if got.is_integer():
            return f"; write {int(got)}"
        case (("int_type" | "float_type" | "bool_type"), str()) if _is_quoted_for_nothing(got):
            return f"; write {got} without quotes"
        case "string_type", bool() | int() | float():
            return f"; quote it: '{shown(got)}'"
        case _:
            return ""


def _is_quoted_for_nothing(text: str) -> bool:
    try:
        return isinstance(plain_scalar(text), int | float)
    except ValueError:
        return False
