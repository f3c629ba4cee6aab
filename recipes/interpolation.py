"""Derived values: ``${model.hidden_size}`` stands for another value, ``${model.hidden_size}/4`` for a fraction of it.

omegaconf resolves the references, relative ones too (``${.num_heads}``), once the overrides are in, so what is derived
follows them. Between numbers, ``*``, ``/`` (of whole numbers only without a remainder) and ``//`` (rounded down) work,
from left to right.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    KeyValidationError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from .errors import Fault, KeyPath, did_you_mean
from .known_keys import value_at

_TERM = r"(?:\$\{[^{}]+\}|\d+(?:\.\d+)?)"
_ARITHMETIC = re.compile(rf"(?=.*\$\{{)\s*{_TERM}(?:\s*(?://|[*/])\s*{_TERM})+\s*")
_PIECE = re.compile(rf"{_TERM}|//|[*/]")
_UNKNOWN = "???"  # omegaconf's sign for a value that is still to come
_STILL_TO_COME = (InterpolationToMissingValueError, MissingMandatoryValue)
_SCRATCH = "scratch of statemix"


def resolve(data: dict[Any, Any]) -> list[Fault]:
    """Replace every interpolation in ``data`` by its value, in place; returns what could not be resolved."""
    texts = {path: text for path, text in _texts(data, ()) if "${" in text}
    if not texts:
        return []
    faults: dict[KeyPath, str] = {}
    try:
        config = _configuration(data, texts, faults)
    except KeyValidationError:
        # No key of a recipe: validation will say so.
        return []
    _compute_arithmetic(config, texts, faults)
    for path in texts:
        try:
            value = _item(config, path)
        except _STILL_TO_COME:
            # Refers to one of the faults.
            continue
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        value_at(data, path[:-1])[path[-1]] = plain
    return [Fault(path, message) for path, message in faults.items()]


def _configuration(data: dict[Any, Any], texts: Mapping[KeyPath, str], faults: dict[KeyPath, str]) -> Any:
    """``data`` for omegaconf, with every interpolation in place except arithmetic ones."""
    blank = copy.deepcopy(data)
    for path in texts:
        value_at(blank, path[:-1])[path[-1]] = _UNKNOWN
    config = OmegaConf.create(blank, flags={"allow_objects": True})
    references = {path: text for path, text in texts.items() if not _is_arithmetic(path, text)}
    for path, text in references.items():
        try:
            _item(config, path[:-1])[path[-1]] = text
        except OmegaConfBaseException:
            faults[path] = f"expected an interpolation such as ${{model.hidden_size}}, got '{text}'; close the bracket"
    for path, text in references.items():
        try:
            _item(config, path)
        except _STILL_TO_COME:
            pass
        except OmegaConfBaseException as error:
            faults[path] = _reason(error, text, data)
    for path in faults:
        _item(config, path[:-1])[path[-1]] = _UNKNOWN
    return config


def _compute_arithmetic(config: Any, texts: Mapping[KeyPath, str], faults: dict[KeyPath, str]) -> None:
    """Put the numbers in place, each once what it refers to is known."""
    waiting = [path for path, text in texts.items() if _is_arithmetic(path, text)]
    while waiting:
        postponed = []
        for path in waiting:
            parent = _item(config, path[:-1])
            try:
                parent[path[-1]] = _computed(texts[path], parent)
            except _STILL_TO_COME:
                postponed.append(path)
            except OmegaConfBaseException as error:
                faults[path] = _reason(error, texts[path], OmegaConf.to_container(config))
            except ArithmeticError as error:
                faults[path] = f"{error}, in '{texts[path]}'; change one of the numbers"
        if len(postponed) == len(waiting):
            # Those that wait for a faulty one are not at fault themselves.
            for path in [] if faults else postponed:
                faults[path] = f"'{texts[path]}' refers back to itself; write one of the values out"
            return
        waiting = postponed


def _is_arithmetic(path: KeyPath, text: str) -> bool:
    # An item of a list is left as text: stacks have a '*' of their own.
    return isinstance(path[-1], str) and _ARITHMETIC.fullmatch(text) is not None


def _computed(text: str, parent: Any) -> Any:
    """The value of an arithmetic text, or the text with its references filled in when one of them is not a number."""
    pieces = _PIECE.findall(text)
    terms = [_term(piece, parent) for piece in pieces[::2]]
    if not all(isinstance(term, int | float) and not isinstance(term, bool) for term in terms):
        return "".join(str(piece) for pair in zip(terms, [*pieces[1::2], ""], strict=True) for piece in pair)
    value = terms[0]
    for operator, term in zip(pieces[1::2], terms[1:], strict=True):
        value = _apply(operator, value, term)
    return value


def _term(piece: str, parent: Any) -> Any:
    if not piece.startswith("$"):
        return float(piece) if "." in piece else int(piece)
    # Read under the parent for the sake of relative references.
    parent[_SCRATCH] = piece
    try:
        return parent[_SCRATCH]
    finally:
        del parent[_SCRATCH]


def _apply(operator: str, left: float, right: float) -> float:
    if operator == "*":
        return left * right
    if right == 0:
        raise ArithmeticError(f"{left} is divided by zero")
    if operator == "//":
        return left // right
    if isinstance(left, int) and isinstance(right, int):
        if left % right:
            raise ArithmeticError(f"{left} / {right} is not a whole number (// rounds down)")
        return left // right
    return left / right


def _item(config: Any, path: KeyPath) -> Any:
    for key in path:
        config = config[key]
    return config


def _reason(error: Exception, text: str, data: Any) -> str:
    first_line = str(error).split("\n", 1)[0]
    if isinstance(error, InterpolationKeyError):
        key = first_line.split("'")[1]
        *above, last = key.split(".")
        around = value_at(data, tuple(above))
        close = did_you_mean(last, around) if isinstance(around, Mapping) else ""
        return f"'{text}' refers to {key}, which the recipe does not set; set it or write the value out{close}"
    if "Recursive interpolation" in first_line:
        return f"'{text}' refers back to itself; write one of the values out"
    return f"'{text}': {first_line}"


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*path, index))
