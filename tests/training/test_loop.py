"""A run: what it writes, what it reports, that it learns."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from statemix.recipes import Recipe, build, load
from statemix.training import load_model, train
from statemix.training.objective import evaluate
from statemix.training.run_plan import plan_run
from statemix.training.trainer import Trainer

MakeRecipe = Callable[..., Recipe]


def test_a_run_folder_rebuilds_the_trained_model(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe("training.log_every=2", "training.steps=5")
    result = train(recipe, tmp_path / "run", progress=False, device="cpu")
    names = {path.name.split(".tfevents")[0] for path in (tmp_path / "run").iterdir()}
    files = {"recipe.yaml", "model.safetensors", "metrics.jsonl", "state", "curves.png", "result.json", "events.out"}
    assert names == files
    assert load(tmp_path / "run" / "recipe.yaml") == recipe
    task = recipe.build_task()
    again = evaluate(load_model(tmp_path / "run"), task.heldout_batches(2, 2), device=torch.device("cpu"))
    assert again.score(task.metric) == result.heldout_value
    assert again.num_valid == 2 * 2 * 33
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 5]  # every second step, and the last
    assert set(lines[0]) == {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
    assert lines[-1]["loss"] == result.train_loss


def test_the_loss_of_the_first_step_is_that_of_the_freshly_seeded_model(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = make_recipe("training.steps=1", "training.warmup_steps=0", "training.accumulate=3")
    result = train(recipe, tmp_path / "run", progress=False, device="cpu")
    torch.manual_seed(recipe.training.seed)
    batch = recipe.build_task().train_batch(1, 6)
    expected = evaluate(build(recipe), [batch], device=torch.device("cpu")).loss
    assert result.train_loss == pytest.approx(expected, rel=1e-5)  # float32 sums in another order


def test_training_on_text_beats_the_frequency_of_bytes(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe("training.steps=40", "training.batch_size=8", "training.lr=0.01", "training.log_every=20")
    result = train(recipe, tmp_path / "run", progress=False, device="cpu")
    train_bytes = recipe.build_task().split.train  # type: ignore[attr-defined]
    share = torch.bincount(train_bytes.long()).double() / len(train_bytes)
    entropy = -(share * share.log2()).nansum().item()
    assert result.heldout_metric == "bits_per_byte"
    assert result.heldout_value < 0.9 * entropy
    assert result.sample is not None and len(result.sample) == 64 + 16


def test_recall_reports_accuracy(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe("training.task={type: mqar, num_pairs: 4}", "training.steps=2")
    result = train(recipe, tmp_path / "run", progress=False, device="cpu")
    assert result.heldout_metric == "accuracy"
    assert 0 <= result.heldout_value <= 1
    assert result.sample is None


def test_a_finished_run_can_be_resumed_and_reports_the_same(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe("training.steps=2")
    first = train(recipe, tmp_path / "run", progress=False, device="cpu")
    again = train(recipe, tmp_path / "run", resume=True, progress=False, device="cpu")
    assert (again.heldout_value, again.train_loss, again.steps) == (first.heldout_value, first.train_loss, 2)


def test_an_empty_folder_may_be_used_and_parents_are_made(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    assert train(make_recipe("training.steps=1", "training.warmup_steps=0"), folder, progress=False).folder == folder


def test_progress_is_a_bar_on_a_terminal(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train(make_recipe("training.steps=2"), tmp_path / "run", progress=True, device="cpu")
    shown = capsys.readouterr().err
    for part in ("tiny", "2/2", "loss", "bits/byte", "tokens/s", "left"):
        assert part in shown


def test_clipping_bounds_the_update_and_can_be_switched_off(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    norms = []
    for clip in (0.0, 0.125):
        recipe = make_recipe("training.steps=1", "training.warmup_steps=0", f"training.clip={clip}")
        trainer = Trainer(plan_run(recipe, tmp_path / "none", resume=False, stop_after=None, device="cpu"))
        assert trainer.advance().grad_norm > 0.125  # the log shows the norm before clipping
        gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())
    assert norms[0] > 0.125
    assert norms[1] == pytest.approx(0.125, rel=1e-4)  # clipping divides by norm + 1e-6


def test_progress_is_plain_lines_without_a_terminal_and_nothing_when_off(
    make_recipe: MakeRecipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe("training.steps=2")
    train(recipe, tmp_path / "silent", progress=False, device="cpu")
    assert capfd.readouterr() == ("", "")
    train(recipe, tmp_path / "shown", progress=True, device="cpu")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("tiny  2/2  loss ")
    assert "bits/byte" in err and "tokens/s" in err and "0:00 left" in err
