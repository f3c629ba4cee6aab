"""Every transition of the package passes every check: the package's own tests of its transitions."""

import functools

import pytest
import torch

from statemix import ScanResult, scan
from statemix.harness import CATALOGUE, applicable_checks, check_transition

CASES = [(subject, check) for subject in CATALOGUE for check in applicable_checks(CATALOGUE[subject])]


@pytest.mark.parametrize(("subject", "check"), CASES, ids=[f"{subject}-{check}" for subject, check in CASES])
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
