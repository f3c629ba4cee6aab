"""Parity is what it says, a trial runs every model on every task, and negative eigenvalues solve parity."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from statemix.training.batch import IGNORE
from statemix.training.parity import Parity
from statemix.training.trial import RIVALS, trial_settings, try_transition

PARITY = Parity(min_len=3, max_len=7, heldout_len=12, seed=0)


def test_a_label_is_the_parity_of_the_bits_so_far() -> None:
    batch = PARITY.train_batch(1, 5)
    assert list(batch.tokens.shape) == [5, 7] and set(batch.tokens.unique().tolist()) == {0, 1}
    for bits, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        assert labels == [IGNORE, IGNORE, *(sum(bits[: t + 1]) % 2 for t in range(2, 7))]


def test_held_out_labels_start_where_training_ends_and_never_change() -> None:
    (first,), (again,) = (list(PARITY.heldout_batches(1, 4)) for _ in range(2))
    assert torch.equal(first.tokens, again.tokens)
    assert bool((first.labels[:, :7] == IGNORE).all()) and bool((first.labels[:, 7:] != IGNORE).all())


def test_every_step_has_its_own_bits_and_every_setting_its_own_fingerprint() -> None:
    assert not torch.equal(PARITY.train_batch(1, 5).tokens, PARITY.train_batch(2, 5).tokens)
    other = Parity(min_len=3, max_len=7, heldout_len=12, seed=1)
    assert PARITY.fingerprint() != other.fingerprint()


def test_a_trial_scores_every_model_on_every_task_and_draws_them(tmp_path: Path) -> None:
    settings = tuple(replace(setting, steps=1, learning_rates=(5e-3,)) for setting in trial_settings(0))
    lines: list[str] = []
    report = try_transition("mine", "gated_deltanet", settings=settings, show=lines.append)
    assert {(run.model, run.setting) for run in report.runs} == {
        (model, setting) for model in ("mine", *RIVALS) for setting in ("mqar", "parity")
    }
    assert len(lines) == len(report.runs)
    table = report.table().splitlines()
    assert table[-1].startswith("chance") and any(line.startswith("mine") for line in table)
    report.draw(tmp_path / "trial.png")
    assert (tmp_path / "trial.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_parity_needs_beta_above_one() -> None:
    """beta <= 1 stays at chance beyond the trained lengths; beta <= 2 solves them."""
    parity = tuple(setting for setting in trial_settings(0) if setting.name == "parity")
    rivals = {"beta <= 1": RIVALS["DeltaNet, beta <= 1"]}
    report = try_transition("beta <= 2", RIVALS["DeltaNet, beta <= 2"], settings=parity, rivals=rivals)
    accuracy = {run.model: run.accuracy for run in report.runs}
    assert accuracy["beta <= 2"] > 0.99
    assert abs(accuracy["beta <= 1"] - 0.5) < 0.1
