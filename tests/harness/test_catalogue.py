"""Every transition of the package passes every check: the package's own tests of its transitions."""

import pytest

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
