"""Run checks: catch what goes wrong, hold it against what was expected, find the shortest sequence that shows it."""

import difflib
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from .check import Check, CheckFailure
from .context import Context
from .report import HarnessError, Result

SHRINK = (1, 2, 3, 4, 5, 8, 13, 16, 17, 18, 24, 32, 33)  # around one token and the chunk border


def run_checks(
    checks: Mapping[str, Check],
    context: Context,
    *,
    seq_len: int,
    only: Iterable[str] | None,
    expected_failures: Mapping[str, str] | None,
    include_slow: bool,
    reproduce: Callable[[str], str],
) -> tuple[Result, ...]:
    """The results of those ``checks`` that apply to a subject, on sequences of ``seq_len`` tokens or fewer.

    ``only``, ``expected_failures`` and ``include_slow`` are what ``check_transition`` and ``check_mixer`` are called
    with; ``reproduce(name)`` says how one check is run alone.

    Raises:
        HarnessError: a name that is not that of a check.
    """
    gaps, selected = dict(expected_failures or {}), checks.keys() if only is None else set(only)
    for name in [*gaps, *selected]:
        _expect_known(name, checks)
    return tuple(
        _result(check, context, seq_len, gaps.get(check.name), reproduce(check.name))
        for check in applicable(checks, context, include_slow=include_slow or only is not None)
        if check.name in selected
    )


def applicable(checks: Mapping[str, Check], context: Context, *, include_slow: bool) -> list[Check]:
    """The checks that concern what the subject has."""
    return [c for c in checks.values() if c.needs <= context.capabilities and (include_slow or not c.is_slow)]


def _result(check: Check, context: Context, seq_len: int, gap: str | None, reproduce: str) -> Result:
    """What became of a check; a failure is shown on the shortest sequence that has it."""
    started = time.perf_counter()
    message = _failure(check, context, seq_len)
    result = Result(check.name, "passed", reason=check.reason, seconds=time.perf_counter() - started)
    if gap is not None and message is not None:
        return replace(result, outcome="expected failure", message=gap)
    if gap is not None:
        message = f"declared as a known gap ({gap}), but it passes; remove it from expected_failures"
        return replace(result, outcome="unexpected pass", message=message, reproduce=reproduce)
    if message is None:
        return result
    failed = replace(result, outcome="failed", message=message, reproduce=reproduce)
    if not check.depends_on_length:
        return failed
    for shorter in (t for t in SHRINK if t < seq_len):
        shown = _failure(check, context, shorter)
        if shown is not None:
            return replace(failed, message=shown, smallest_seq_len=shorter)
    return replace(failed, smallest_seq_len=seq_len)


def _expect_known(name: str, checks: Iterable[str]) -> None:
    known = list(checks)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise HarnessError(f"check: expected one of {', '.join(known)}, got {name!r}{hint}")


def _failure(check: Check, context: Context, seq_len: int) -> str | None:
    """None if the check holds, else what went wrong; an exception of the subject's own code counts as a failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            check.function(context.with_length(seq_len))
    except CheckFailure as failure:
        return str(failure)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}{_place(error)}"
    return None


def _place(error: Exception) -> str:
    """Where it was raised: the innermost line that belongs neither to torch nor to the harness."""
    own, torch_folder = Path(__file__).resolve().parent, Path(torch.__file__).resolve().parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if own not in file.parents and torch_folder not in file.parents:
            return f" ({file.name}, line {frame.lineno}: {frame.line})"
    return ""
