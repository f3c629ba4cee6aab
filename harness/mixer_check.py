"""A check of a whole mixer: a name, a reason in one line, and a function that raises CheckFailure."""

from collections.abc import Callable
from dataclasses import dataclass

from .mixer_context import MixerContext

Function = Callable[[MixerContext, int], None]


@dataclass(frozen=True)
class MixerCheck:
    """One named property of a mixer.

    Attributes:
        name: what ``only=`` selects.
        reason: one line, what breaks when it fails.
        function: takes the mixer and a number of tokens; raises on failure.
        needs_float64: left out where the high precision is float32.
        depends_on_length: whether a failure is worth showing on a shorter sequence.
        is_slow: runs when asked for by name or by ``include_slow``.
    """

    name: str
    reason: str
    function: Function
    needs_float64: bool
    depends_on_length: bool
    is_slow: bool


MIXER_CHECKS: dict[str, MixerCheck] = {}


def mixer_check(
    reason: str,
    *,
    needs_float64: bool = False,
    depends_on_length: bool = True,
    is_slow: bool = False,
) -> Callable[[Function], Function]:
    """Register a function as a check under its own name."""

    def register(function: Function) -> Function:
        name = function.__name__
        MIXER_CHECKS[name] = MixerCheck(name, reason, function, needs_float64, depends_on_length, is_slow)
        return function

    return register
