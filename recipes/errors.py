"""RecipeError, and how a fault is worded: place, key path, what is wrong, what to do."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

KeyPath = tuple[Any, ...]
"""Keys from the top of a recipe down to a value: ``("layers", "delta", "mixer")``, ``("stack", 3)``."""

MAX_FAULTS = 8


class RecipeError(ValueError):
    """A recipe that cannot be used. ``faults`` holds one message a fault; the text shows the first eight."""

    def __init__(self, *faults: str) -> None:
        super().__init__(*faults)
        self.faults = faults

    def __str__(self) -> str:
        hidden = len(self.faults) - MAX_FAULTS
        more = [f"... and {hidden} more"] if hidden > 0 else []
        return "\n".join([*self.faults[:MAX_FAULTS], *more])


@dataclass(frozen=True)
class Fault:
    """One thing wrong at one key path; ``at_key`` points at the key itself, otherwise at its value."""

    path: KeyPath
    message: str
    at_key: bool = False


class Inconsistent(ValueError):
    """Raised inside validators that find several faults at once; paths are relative to the validated model."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(f"{dotted(fault.path)}: {fault.message}" for fault in faults))
        self.faults = tuple(faults)


def dotted(path: KeyPath) -> str:
    """The key path as it is written in an override: ``stack.3``."""
    return ".".join(str(key) for key in path)


def nearest(name: object, known: Iterable[object]) -> str | None:
    """The known name most like ``name``, or None when nothing is near."""
    # Half of the letters in common: one wrong letter in "lr" still finds it.
    matches = get_close_matches(str(name).lower(), {str(other).lower(): other for other in known}, n=1, cutoff=0.5)
    return next((str(other) for other in known if str(other).lower() in matches), None)


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """``; did you mean x?``, or nothing when nothing is near."""
    close = nearest(name, tuple(known))
    return f"; did you mean {close}?" if close else ""


def excerpt(text: str, position: int) -> str:
    """The line of ``text`` that holds ``position`` (from 0), with a caret below it, each on a line of its own."""
    start = text.rfind("\n", 0, position) + 1
    line = text[start:].split("\n", 1)[0]
    # A tab prints wider than one column and would push the caret off.
    return f"\n    {line.expandtabs(1)}\n    {' ' * (position - start)}^" if line.strip() else ""


def one_of(names: Iterable[object]) -> str:
    """``one of a, b, c``, or the only name there is."""
    listed = [str(name) for name in names]
    return listed[0] if len(listed) == 1 else f"one of {', '.join(listed)}"


def shown(value: object) -> str:
    """A value as the recipe's author wrote it, short."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            return f"'{value}'"
        case Mapping():
            return f"a mapping with {', '.join(map(str, value))}" if value else "an empty mapping"
        case list() | tuple():
            return f"a list of {len(value)}"
        case _:
            return repr(value)
