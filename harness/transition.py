"""Check a transition: ``check_transition`` for a report, ``transition_checks`` for named pytest cases.

report = check_transition(MyTransition)
assert report.ok, report

@transition_checks(MyTransition)
def test_my_transition(check):
    check()
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

import statemix.transitions
from statemix.transitions import ScanResult, Transition

from . import (  # noqa: F401  (register)
    check_algebra,
    check_forms,
    check_invariance,
    check_lowering,
    check_numerics,
    check_program,
)
from .check import CHECKS, Check
from .context import Context, Make, Subject
from .problem import Problem, Sizes
from .report import HarnessError, Report, Result
from .running import expect_known, run_check
from .structure import measure

Subjectlike = type[Transition] | Subject | Make


def check_transition(
    transition: Subjectlike,
    *,
    expected_failures: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
    scan: Callable[..., ScanResult] | None = None,
    seed: int = 0,
    sizes: Sizes | None = None,
    dtype: torch.dtype = torch.float64,
    forms: tuple[str, ...] | None = None,
    include_slow: bool = False,
    reproduce: str = "",
) -> Report:
    """Run every check that applies.

    Args:
        transition: a Transition class, a catalogue ``Subject``, or a function (sizes, generator) -> Problem.
        expected_failures: check name -> reason for known gaps; one that passes is a failure.
        only: names of the checks to run.
        scan: the implementation to hold against the definition; ``statemix.scan`` if None.
        seed: of the random inputs.
        sizes: of the random inputs.
        dtype: of the random inputs; float32 for a scan that takes no float64, whose checks of M_t are then left out.
        forms: those that the scan has; None for all.
        include_slow: also those checks that take long.
        reproduce: how to call this again, shown beside failures.

    Raises:
        HarnessError: the class has no usable ``apply``, or a name is not that of a check.
    """
    subject = as_subject(transition)
    expected = dict(expected_failures or {})
    selected = list(only) if only is not None else None
    for name in [*expected, *(selected or [])]:
        expect_known(name, CHECKS)
    context, sizes = replace(_context(subject, scan, seed), dtype=dtype, only_forms=forms), sizes or Sizes()
    call = reproduce or f"check_transition({subject.name}, seed={seed}"
    results = [
        _run(c, context, sizes, expected.get(c.name), call)
        for c in applicable(context, sizes, include_slow=include_slow or selected is not None)
        if selected is None or c.name in selected
    ]
    return Report(subject.name, tuple(results), _notes(context, sizes))


def transition_checks(
    transition: Subjectlike,
    *,
    expected_failures: Mapping[str, str] | None = None,
    scan: Callable[..., ScanResult] | None = None,
    include_slow: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: one pytest case for each check, named so that ``-k chunk_sizes_agree`` selects it.

    The test takes an argument ``check`` and calls it.
    """
    import pytest

    subject = as_subject(transition)
    names = [c.name for c in applicable(_context(subject, scan, 0), Sizes(), include_slow=include_slow)]

    def case(name: str) -> Callable[[], None]:
        def run() -> None:
            report = check_transition(subject, expected_failures=_only(expected_failures, name), only=[name], scan=scan)
            assert report.ok, f"\n{report}"

        return run

    return pytest.mark.parametrize("check", [pytest.param(case(name), id=name) for name in names])


def applicable_checks(transition: Subjectlike, *, include_slow: bool = False) -> tuple[str, ...]:
    """Names of the checks that concern what a transition has."""
    context = _context(as_subject(transition), None, 0)
    return tuple(c.name for c in applicable(context, Sizes(), include_slow=include_slow))


def applicable(context: Context, sizes: Sizes, *, include_slow: bool) -> list[Check]:
    """The checks that concern what the subject has."""
    problem = context.problem(sizes)
    return [
        c
        for c in CHECKS.values()
        if (include_slow or not c.is_slow)
        and (context.has_chunk_form or not c.needs_chunk_form)
        and (context.dtype == torch.float64 or not c.needs_float64)
        and c.applies(problem)
    ]


def as_subject(transition: Subjectlike) -> Subject:
    """A Transition class, Subject or sampler as a Subject."""
    if isinstance(transition, Subject):
        return transition
    if not isinstance(transition, type):
        return Subject(getattr(transition, "__name__", "transition"), transition)
    if not issubclass(transition, Transition):
        raise HarnessError(f"transition: expected a subclass of statemix.transitions.Transition, got {transition!r}")
    missing = sorted(getattr(transition, "__abstractmethods__", ()))
    if missing:
        raise HarnessError(
            f"{transition.__name__}: expected a method apply(self, state) that returns S M_t for one token; "
            f"missing: {', '.join(missing)}"
        )
    return Subject(transition.__name__, lambda sizes, generator: _example(transition, sizes, generator))


def _example(cls: type[Transition], sizes: Sizes, generator: torch.Generator) -> Problem:
    """A problem around ``cls.example``: its field ``key`` is the write key, its ``natural_write`` the write."""
    whole = cls.example(sizes.batch, sizes.seq_len, sizes.num_value_heads, sizes.key_dim, generator)
    groups = sizes.num_value_heads // sizes.num_heads
    transition = whole.map_tensors(lambda kind, x: x[..., ::groups, :].contiguous() if kind.is_per_key_head else x)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    key = transition.write_key
    if key is None:
        key = normal(sizes.batch, sizes.seq_len, sizes.num_heads, sizes.key_dim)
        key = key / key.norm(dim=-1, keepdim=True)
    q = normal(sizes.batch, sizes.seq_len, sizes.num_heads, sizes.key_dim)
    v = normal(sizes.batch, sizes.seq_len, *key.shape[2:-2], sizes.num_value_heads, sizes.value_dim)
    return Problem(q, key, v, transition, transition.natural_write)


def _context(subject: Subject, scan: Callable[..., ScanResult] | None, seed: int) -> Context:
    chosen = statemix.transitions.scan if scan is None else scan
    context = Context(subject, chosen, seed)
    try:
        context.problem(Sizes()).transition.lower()
    except NotImplementedError:
        return context
    except Exception:  # a lower() that raises is there, and the checks of it will say so
        pass
    return replace(context, has_chunk_form=True)


def _run(check: Check, context: Context, sizes: Sizes, expected: str | None, call: str) -> Result:
    is_command = not call.startswith("check_transition")
    return run_check(
        check.name,
        lambda seq_len: check.function(context, replace(sizes, seq_len=seq_len)),
        reason=check.reason,
        seq_len=sizes.seq_len,
        depends_on_length=True,
        expected=expected,
        reproduce=f"{call} --only {check.name}" if is_command else f"{call}, only=[{check.name!r}])",
    )


def _notes(context: Context, sizes: Sizes) -> tuple[str, ...]:
    if context.has_chunk_form:
        return ()
    return ("no lower(): runs in form='recurrent' only", str(measure(context.problem(sizes))))


def _only(expected: Mapping[str, str] | None, name: str) -> dict[str, str]:
    return {name: expected[name]} if expected and name in expected else {}
