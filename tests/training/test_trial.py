"""Trials: who is beside whom, what a row says, and that parity tells reflections from decays."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from statemix.cli import main
from statemix.training import trial
from statemix.training.trial import RIVALS, SOLVED, Run, Setting, TrialReport, trial_settings, try_transition

GATE = """\
from statemix.transitions import LogDecay, Transition


class ToyGate(Transition):
    gate: LogDecay

    def apply(self, state):
        return self.gate.exp()[..., None, None] * state
"""


def brief(*, steps: int = 2) -> tuple[Setting, ...]:
    return tuple(replace(setting, steps=steps) for setting in trial_settings(0))


def test_every_model_meets_every_task_at_the_same_size(tmp_path: Path) -> None:
    lines: list[str] = []
    report = try_transition("mine", "retnet", settings=brief(), rivals={"GLA": "gla"}, show=lines.append)
    assert [(run.setting, run.model) for run in report.runs] == [
        (task, model) for task in ("mqar", "parity") for model in ("mine", "GLA")
    ]
    assert [line.split()[0] for line in lines] == ["mqar", "mqar", "parity", "parity"]
    assert [line.split()[0] for line in report.table().splitlines()[1:]] == ["mine", "GLA", "chance"]
    assert all(0 <= run.accuracy <= 1 for run in report.runs)
    report.draw(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_trial_is_a_function_of_its_seed() -> None:
    [setting] = (setting for setting in brief() if setting.name == "parity")
    curves = [
        try_transition("mine", "deltanet", settings=(setting,), rivals={}, seed=seed).runs[0].curve
        for seed in (0, 0, 1)
    ]
    assert curves[0] == curves[1] != curves[2]


def test_a_loss_that_is_not_finite_is_said_and_another_learning_rate_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    [setting] = (setting for setting in brief() if setting.name == "parity")
    scores = {0.1: ((1, math.nan),), 0.2: ((2, 0.25),)}
    monkeypatch.setattr(trial, "_learn", lambda transition, setting, *, lr, seed: scores[lr])
    for rates, expected in (((0.1,), math.nan), ((0.1, 0.2), 0.25), ((0.2, 0.1), 0.25)):
        [run] = try_transition("mine", "retnet", settings=(replace(setting, learning_rates=rates),), rivals={}).runs
        assert run.accuracy == expected or math.isnan(run.accuracy) and math.isnan(expected)
        assert ("not finite at step 1" in str(run)) == math.isnan(expected)


def test_a_plot_of_runs_that_diverged_at_once_is_drawn(tmp_path: Path) -> None:
    [setting] = (setting for setting in brief() if setting.name == "parity")
    TrialReport((setting,), (Run("mine", "parity", 0.1, ((1, math.nan),), 1.0),)).draw(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").is_file()


@pytest.mark.slow
def test_parity_is_solved_with_beta_up_to_two_and_by_none_of_the_others() -> None:
    settings = tuple(setting for setting in trial_settings(0) if setting.name == "parity")
    runs = {run.model: run for run in try_transition("RetNet", "retnet", settings=settings).runs}
    assert runs.pop("DeltaNet, beta <= 2").accuracy >= SOLVED
    for run in runs.values():
        assert abs(run.accuracy - 0.5) <= 0.03, run  # 10240 labels: chance is within 0.005 of one half


@pytest.mark.slow
def test_deltanet_recalls_nearly_all_pairs() -> None:
    settings = tuple(setting for setting in trial_settings(0) if setting.name == "mqar")
    assert try_transition("DeltaNet", "deltanet", settings=settings, rivals={}).runs[0].accuracy >= 0.9


def test_the_command_names_the_class_prints_a_table_and_writes_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "trial_settings", lambda seed: brief(steps=1))
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(GATE)
    assert main(["try", "toy.py:ToyGate", "--seed", "1"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("toy_gate", *RIVALS, "chance", "toy_gate-trial.png"))
    assert Path("toy_gate-trial.png").is_file()
    for arguments, named in ((["toy.py:Toy"], "ToyGate"), (["toy.py", "--out", "no/plot.png"], "no/plot.png")):
        assert main(["try", *arguments]) == 2
        assert named in capsys.readouterr().err
