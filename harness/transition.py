"""Check a transition: ``check_transition`` for a report, ``transition_checks`` for named pytest cases.

report = check_transition(MyTransition)
assert report.ok, report

@transition_checks(MyTransition)
def test_my_transition(check):
    check()
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

import statemix.transitions
from statemix.transitions import ScanResult, Transition

from .check import Capability, checks_in
from .problem import Make, Problem, Sizes, Subject
from .recurrence_checks import algebra, forms, invariance, lowering, numerics, program
from .recurrence_checks.recurrence import Recurrence
from .report import HarnessError, Report
from .running import applicable, run_checks
from .structure import measure

CHECKS = checks_in(algebra, forms, invariance, lowering, numerics, program)
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
        forms: those that the scan has; None for all that the transition has.
        include_slow: also those checks that take long.
        reproduce: a command that does this again, shown beside failures with ``--only CHECK``.

    Raises:
        HarnessError: the class has no usable ``apply``, or a name is not that of a check.
    """
    subject, sizes = as_subject(transition), sizes or Sizes()
    recurrence = _recurrence(subject, scan=scan, seed=seed, sizes=sizes, dtype=dtype, forms=forms)
    results = run_checks(
        CHECKS,
        recurrence,
        seq_len=sizes.seq_len,
        only=only,
        expected_failures=expected_failures,
        include_slow=include_slow,
        reproduce=lambda name: (
            f"{reproduce} --only {name}"
            if reproduce
            else f"check_transition({subject.name}, seed={seed}, only=[{name!r}])"
        ),
    )
    return Report(subject.name, results, _notes(recurrence))


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
    names = [c.name for c in applicable(CHECKS, _recurrence(subject, scan=scan), include_slow=include_slow)]

    def case(name: str) -> Callable[[], None]:
        def run() -> None:
            report = check_transition(subject, expected_failures=expected_failures, only=[name], scan=scan)
            assert report.ok, f"\n{report}"

        return run

    return pytest.mark.parametrize("check", [pytest.param(case(name), id=name) for name in names])


def applicable_checks(transition: Subjectlike, *, include_slow: bool = False) -> tuple[str, ...]:
    """Names of the checks that concern what a transition has."""
    recurrence = _recurrence(as_subject(transition))
    return tuple(c.name for c in applicable(CHECKS, recurrence, include_slow=include_slow))


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


def _recurrence(
    subject: Subject,
    *,
    scan: Callable[..., ScanResult] | None = None,
    seed: int = 0,
    sizes: Sizes | None = None,
    dtype: torch.dtype = torch.float64,
    forms: tuple[str, ...] | None = None,
) -> Recurrence:
    sizes = sizes or Sizes()
    problem = subject.make(sizes, torch.Generator().manual_seed(seed))
    axes, lowers = [axes for _, _, axes in problem.named()], _lowers(problem.transition)
    has: dict[Capability, bool] = {
        "float64": dtype == torch.float64,
        "has_chunk_form": lowers,
        "has_decay": any(a.is_log_decay and a.token is not None for a in axes),
        "has_direction": any(a.is_unit for a in axes),
    }
    return Recurrence(
        subject.name,
        seed,
        dtype,
        frozenset(name for name in has if has[name]),
        subject.make,
        sizes,
        scan or statemix.transitions.scan,
        forms or (("recurrent", "chunk", "parallel") if lowers else ("recurrent",)),
    )


def _lowers(transition: Transition) -> bool:
    try:
        transition.lower()
    except NotImplementedError:
        return False
    except Exception:  # a lower() that raises is there, and the checks of it will say so
        pass
    return True


def _notes(recurrence: Recurrence) -> tuple[str, ...]:
    if "has_chunk_form" in recurrence.capabilities:
        return ()
    return ("no lower(): runs in form='recurrent' only", str(measure(recurrence.problem())))
