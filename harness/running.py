"""Run one check: catch what goes wrong, hold it against what was expected, find the shortest sequence that shows it."""

import difflib
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from .context import CheckFailure
from .report import HarnessError, Result

SHRINK = (1, 2, 3, 4, 5, 8, 13, 16, 17, 18, 24, 32, 33)  # around one token and the chunk border


def run_check(
    name: str,
    attempt: Callable[[int], None],
    *,
    reason: str,
    seq_len: int,
    depends_on_length: bool,
    expected: str | None,
    reproduce: str,
) -> Result:
    """The result of ``attempt(seq_len)``, which raises when the check does not hold.

    Args:
        name: of the check.
        attempt: runs it on sequences of the given length.
        reason: what breaks when it fails, in one line.
        seq_len: length to try first.
        depends_on_length: whether to look for a shorter sequence that fails.
        expected: why a failure is expected; None when it is not.
        reproduce: what runs this check alone.
    """
    started = time.perf_counter()
    message = failure_of(attempt, seq_len)
    seconds = time.perf_counter() - started
    if expected is not None and message is not None:
        return Result(name, "expected failure", expected, reason, seconds=seconds)
    if expected is not None:
        message = f"declared as a known gap ({expected}), but it passes; remove it from expected_failures"
        return Result(name, "unexpected pass", message, reason, None, reproduce, seconds)
    if message is None:
        return Result(name, "passed", seconds=seconds)
    if not depends_on_length:
        return Result(name, "failed", message, reason, None, reproduce, seconds)
    for shorter in (t for t in SHRINK if t < seq_len):
        shown = failure_of(attempt, shorter)
        if shown is not None:
            return Result(name, "failed", shown, reason, shorter, reproduce, seconds)
    return Result(name, "failed", message, reason, seq_len, reproduce, seconds)


def expect_known(name: str, checks: Iterable[str]) -> None:
    """Raise HarnessError for a name that is not that of a check."""
    known = list(checks)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise HarnessError(f"check: expected one of {', '.join(known)}, got {name!r}{hint}")


def failure_of(attempt: Callable[[int], None], seq_len: int) -> str | None:
    """None if the check holds, else what went wrong; an exception of the subject's own code counts as a failure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            attempt(seq_len)
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
