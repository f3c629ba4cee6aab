"""What a run of the harness gives: results by name, and how a failure is shown."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["passed", "failed", "expected failure", "unexpected pass"]


class HarnessError(ValueError):
    """The subject cannot be checked at all: no ``apply``, a wrong shape, a name that does not exist."""


@dataclass(frozen=True)
class Result:
    """One check of one subject.

    Attributes:
        check: its name.
        outcome: an unexpected pass is a failure too: the declared gap no longer exists.
        message: where it failed and by how much; the declared reason for an expected failure.
        reason: what the check is about, in one line.
        smallest_seq_len: the shortest sequence that fails.
        reproduce: a command or call that runs this check alone.
        seconds: time it took.
    """

    check: str
    outcome: Outcome
    message: str = ""
    reason: str = ""
    smallest_seq_len: int | None = None
    reproduce: str = ""
    seconds: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.outcome in ("failed", "unexpected pass")

    def __str__(self) -> str:
        if not self.is_failure:
            return f"{self.outcome:<17} {self.check}" + (f": {self.message}" if self.message else "")
        lines = [f"{self.outcome.upper():<17} {self.check}: {self.message}", f"  why it matters: {self.reason}"]
        if self.smallest_seq_len is not None:
            lines.append(f"  smallest failing T: {self.smallest_seq_len}")
        return "\n".join([*lines, f"  reproduce: {self.reproduce}"])


@dataclass(frozen=True)
class Report:
    """All results for one subject, and what was measured of it."""

    subject: str
    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[tuple[str, str]]:
        """(check, message) of every failure."""
        return [(r.check, r.message) for r in self.results if r.is_failure]

    def __str__(self) -> str:
        failed = [r for r in self.results if r.is_failure]
        expected = sum(r.outcome == "expected failure" for r in self.results)
        summary = f"{self.subject}: {len(self.results) - len(failed) - expected} passed, {len(failed)} failed"
        summary += f", {expected} expected failures" if expected else ""
        seconds = sum(r.seconds for r in self.results)
        return "\n".join([*map(str, failed), *self.notes, f"{summary} in {seconds:.1f} s"])
