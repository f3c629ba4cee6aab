"""``statemix env`` says what is here and what can run."""

import numpy
import pytest
import torch

import statemix
from statemix import environment
from statemix.benchmarks.measured_on import versions
from statemix.cli import main


def test_it_prints_versions_devices_and_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "torch forms" in printed


def test_the_version_of_torch_names_its_build_wherever_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the build that pip gives on Linux does, whose metadata say 2.14.1."""
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    described = environment.describe_environment()
    assert "2.14.1+cu130" in described and f"{'numpy':<14}{numpy.__version__}" in described
    assert versions("no-such-package").items() >= {("torch", "2.14.1+cu130"), ("statemix", statemix.__version__)}


def test_a_missing_package_and_a_missing_gpu_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    described = environment.describe_environment()
    assert "not installed" in described
    assert "there is no GPU" in described
