"""A check: a name, a reason in one line, what its subject must have, and a function that raises CheckFailure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

Capability = Literal[
    "float64",  # computes in float64, for checks that need the digits
    # of a transition
    "has_chunk_form",  # it lowers
    "has_decay",  # a log decay for every token
    "has_direction",  # unit vectors along which it erases
    # of a mixer, as it declares them (mixers/capabilities.py)
    "is_causal",
    "packs",
    "refuses_packing",
    "has_constant_state",
]
Function = Callable[[Any], None]


class CheckFailure(AssertionError):
    """A check that did not hold; the message says where."""


@dataclass(frozen=True)
class Check:
    """One named property of a transition under a scan, or of a whole mixer.

    Attributes:
        name: what ``-k`` and ``only=`` select.
        reason: one line, what breaks when it fails.
        function: takes what is checked, a ``Recurrence`` or a ``CheckedMixer``; raises on failure.
        needs: left out for a subject without all of these.
        depends_on_length: whether a failure is worth showing on a shorter sequence.
        is_slow: runs when asked for by name or by ``include_slow``.
    """

    name: str
    reason: str
    function: Function
    needs: frozenset[Capability] = frozenset()
    depends_on_length: bool = True
    is_slow: bool = False


def check(
    reason: str, *, needs: Iterable[Capability] = (), depends_on_length: bool = True, is_slow: bool = False
) -> Callable[[Function], Check]:
    """Make a function the check of its own name."""

    def named(function: Function) -> Check:
        return Check(function.__name__, reason, function, frozenset(needs), depends_on_length, is_slow)

    return named


def checks_in(*modules: ModuleType) -> dict[str, Check]:
    """The checks that modules define, by name, in the order of the files."""
    return {x.name: x for module in modules for x in vars(module).values() if isinstance(x, Check)}
