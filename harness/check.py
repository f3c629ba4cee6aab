"""A check: a name, a reason in one line, when it applies, and a function that raises CheckFailure."""

from collections.abc import Callable
from dataclasses import dataclass

from .context import Context
from .problem import Problem, Sizes

Function = Callable[[Context, Sizes], None]


@dataclass(frozen=True)
class Check:
    """One named property of a transition under a scan.

    Attributes:
        name: what ``-k`` and ``only=`` select.
        reason: one line, what breaks when it fails.
        function: raises on failure.
        applies: whether a problem of the subject has what the check is about.
        needs_chunk_form: the check is about ``lower``.
        needs_float64: the check is about M_t rather than the scan, or needs digits; left out for other inputs.
        is_slow: left to ``make test-all``.
    """

    name: str
    reason: str
    function: Function
    applies: Callable[[Problem], bool]
    needs_chunk_form: bool
    needs_float64: bool
    is_slow: bool


CHECKS: dict[str, Check] = {}


def check(
    reason: str,
    *,
    applies: Callable[[Problem], bool] = lambda problem: True,
    needs_chunk_form: bool = False,
    needs_float64: bool = False,
    is_slow: bool = False,
) -> Callable[[Function], Function]:
    """Register a function as a check under its own name."""

    def register(function: Function) -> Function:
        name = function.__name__
        CHECKS[name] = Check(name, reason, function, applies, needs_chunk_form, needs_float64, is_slow)
        return function

    return register
