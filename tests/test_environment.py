"""``statemix env`` says what is here and what can run."""

import pytest
import torch

from statemix import environment
from statemix.cli import main


def test_it_prints_versions_devices_and_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and "torch forms" in printed


def test_a_missing_package_and_a_missing_gpu_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    described = environment.describe_environment()
    assert "not installed" in described
    assert "there is no GPU" in described
