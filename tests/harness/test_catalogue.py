"""Every transition of the package passes every check: the package's own tests of its transitions."""

import functools
from typing import Any

import pytest
import torch

from statemix import ScanResult, scan
from statemix.harness import CATALOGUE, applicable_checks, check_transition

# The compiler takes seconds for each transition. Here: one for every way through the chunk form.
COMPILED = {"scalar_gate", "diagonal_gate", "gated_householder", "two_directions", "block_diagonal"}


def case(subject: str, check: str) -> Any:
    is_slow = check == "chunk_form_compiles" and subject not in COMPILED
    return pytest.param(subject, check, id=f"{subject}-{check}", marks=[pytest.mark.slow] if is_slow else [])


CASES = [case(subject, check) for subject in CATALOGUE for check in applicable_checks(CATALOGUE[subject])]


@pytest.mark.parametrize(("subject", "check"), CASES)
def test_a_transition_of_the_package_passes(subject: str, check: str) -> None:
    report = check_transition(CATALOGUE[subject], only=[check])
    assert report.ok, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("subject", CATALOGUE)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_transition_of_the_package_passes_with_other_inputs(subject: str, seed: int) -> None:
    report = check_transition(CATALOGUE[subject], seed=seed, include_slow=True)
    assert report.ok, f"\n{report}"


def test_a_scan_that_takes_no_float64_and_has_one_form_is_checked_in_float32() -> None:
    @functools.wraps(scan)
    def low(q: torch.Tensor, *given: object, form: str, **options: object) -> ScanResult:
        assert q.dtype != torch.float64 and form in ("chunk", "auto")
        return scan(q, *given, form=form, **options)  # type: ignore[arg-type]

    report = check_transition(CATALOGUE["scalar_gate"], scan=low, dtype=torch.float32, forms=("chunk",))
    assert report.ok, f"\n{report}"
    assert len(report.results) > 20
