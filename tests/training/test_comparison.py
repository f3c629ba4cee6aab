"""Two recipes on the same data."""

from collections.abc import Callable
from pathlib import Path

import pytest

from statemix.recipes import Recipe, load
from statemix.training import Interrupted, compare
from statemix.training.trainer import Trainer

MakeRecipe = Callable[..., Recipe]


def test_the_rival_trains_on_the_terms_of_the_recipe_inside_its_folder(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe("training.steps=2")
    rival = make_recipe("name=attention", "stack=window*2", "training.steps=50", "training.lr=0.1")
    comparison = compare(recipe, rival, tmp_path / "run", progress=False, device="cpu")
    assert comparison.rival.folder == tmp_path / "run" / "versus-attention"
    assert load(comparison.rival.folder / "recipe.yaml").training == recipe.training
    assert comparison.rival.steps == comparison.own.steps == 2
    header, own, other, note, where = comparison.table().splitlines()
    assert "held-out bits per byte" in header and own.startswith("tiny") and other.startswith("attention")
    assert (own.count("*"), other.count("*")) == ((1, 0) if "*" in own else (0, 1))
    assert "lower" in note
    assert where == f"attention is written to {tmp_path}/run/versus-attention"


def test_both_recipes_are_checked_before_anything_is_written(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    small = make_recipe("training.task={type: mqar, num_pairs: 2}", "model.vocab_size=8")
    with pytest.raises(ValueError, match=r"model\.vocab_size: expected 256"):
        compare(make_recipe(), small, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_comparison_stopped_in_either_run_can_be_resumed(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, rival = make_recipe("training.steps=3"), make_recipe("training.steps=3", "name=other")
    expected = compare(recipe, rival, tmp_path / "straight", progress=False, device="cpu")
    advance = Trainer.advance
    calls = 0

    def interrupted(self: Trainer) -> object:
        nonlocal calls
        calls += 1
        if calls in (2, 6):  # in the first run, then in the second
            raise KeyboardInterrupt
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", interrupted)
    for resume in (False, True):
        with pytest.raises(Interrupted):
            compare(recipe, rival, tmp_path / "run", resume=resume, progress=False, device="cpu")
    comparison = compare(recipe, rival, tmp_path / "run", resume=True, progress=False, device="cpu")
    assert comparison.own.heldout_value == expected.own.heldout_value
    assert comparison.rival.heldout_value == expected.rival.heldout_value
