"""A crash at any point of a checkpoint leaves the old one or the new one whole."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from statemix.recipes import Recipe
from statemix.training import load_model, model_folder
from statemix.training.run_plan import plan_run
from statemix.training.run_state import read_state
from statemix.training.trainer import Trainer

MakeRecipe = Callable[..., Recipe]


class Crash(BaseException):
    """Not an Exception, so that nothing cleans up on its way as it might after an error."""


def crash_at(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash at the given call, counted from 0, of whatever touches the disk for good."""
    calls = 0

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise Crash
            return real(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(Path, "replace", counted(Path.replace))
    monkeypatch.setattr(torch, "save", counted(torch.save))
    monkeypatch.setattr(model_folder, "save_file", counted(model_folder.save_file))


def trainer_at_step_one(recipe: Recipe, folder: Path) -> Trainer:
    folder.mkdir(parents=True)
    trainer = Trainer(plan_run(recipe, folder, resume=False, stop_after=None, device="cpu"))
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    trainer.advance()
    trainer.save()
    return trainer


@pytest.mark.parametrize(
    "call", range(7)
)  # a checkpoint makes six such calls: write, fsync, rename for each of two files
def test_a_crash_leaves_a_whole_checkpoint(
    call: int, make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe()
    trainer = trainer_at_step_one(recipe, tmp_path / "run")
    weights = {1: trainer.model.norm.weight.detach().clone()}
    trainer.advance()
    weights[2] = trainer.model.norm.weight.detach().clone()
    with monkeypatch.context() as patch:
        crash_at(call, patch)
        if call < 6:
            with pytest.raises(Crash):
                trainer.save()
        else:
            trainer.save()
    resumed = Trainer(plan_run(recipe, tmp_path / "run", resume=True, stop_after=None, device="cpu"))
    step = resumed.step
    assert step == (1 if call < 6 else 2)
    assert torch.equal(load_model(tmp_path / "run").norm.weight, weights[step])
    assert torch.equal(resumed.model.norm.weight, weights[step])
    assert {int(state["step"]) for state in resumed.optimizer.state.values()} == {step}
    resumed.advance()
    resumed.save()
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == [f"step-{step + 1}.pt"]


def test_weights_without_their_state_cannot_be_resumed(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    trainer_at_step_one(make_recipe(), tmp_path / "run")
    (tmp_path / "run" / "state" / "step-1.pt").unlink()
    with pytest.raises(ValueError, match=r"out: expected a checkpoint of training in .*run.*load_model"):
        read_state(tmp_path / "run")
