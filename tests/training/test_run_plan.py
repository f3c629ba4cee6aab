"""What refuses a run, before anything is written."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from statemix.recipes import Recipe
from statemix.training import train

MakeRecipe = Callable[..., Recipe]


@pytest.fixture(scope="module")
def stopped_run(make_recipe: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(make_recipe("training.steps=4"), folder, stop_after=2, progress=False, device="cpu")
    return folder


@pytest.fixture
def run(stopped_run: Path, tmp_path: Path) -> Path:
    """A run of four steps, stopped after two."""
    return shutil.copytree(stopped_run, tmp_path / "run")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_holds_something_is_refused_by_name_and_left_alone(
    run: Path, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    before = snapshot(tmp_path)
    for taken in (run, run / "state", run / "metrics.jsonl"):
        with pytest.raises(ValueError, match=rf"out: expected a new or empty folder, got .*{taken.name}"):
            train(make_recipe(), taken, progress=False)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_resuming_where_there_is_no_checkpoint_is_refused_by_name(
    name: str, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"out: expected a run folder with a checkpoint, got .*{name}"):
        train(make_recipe(), tmp_path / name, resume=True, progress=False)
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lr=0.004", r"training\.lr: expected 0\.003 .* got 0\.004"),
        ("training.warmup_steps=1", r"training\.warmup_steps: expected 2 .* got 1"),
        ("training.steps=3", r"training\.steps: expected 4 .* got 3"),
        ("training.seed=4", r"training\.seed: expected 3 .* got 4"),
        ("layers.window.mixer.window=6", r"layers\.window\.mixer\.window: expected 7 .* got 6"),
        ("model.hidden_size=32", r"model\.hidden_size: expected 16 .* got 32"),
        ("training.task={type: mqar, num_pairs: 2}", r"training\.task\.type: expected 'text' .* got 'mqar'"),
    ],
)
def test_resuming_with_another_recipe_names_the_first_difference(
    override: str, message: str, run: Path, make_recipe: MakeRecipe
) -> None:
    before = snapshot(run)
    with pytest.raises(ValueError, match=message):
        train(make_recipe("training.steps=4", override), run, resume=True, progress=False)
    assert snapshot(run) == before


def test_steps_may_be_raised_and_the_intervals_changed_on_resume(run: Path, make_recipe: MakeRecipe) -> None:
    changes = (
        "training.steps=5",
        "training.warmup_steps=3",
        "training.log_every=2",
        "training.checkpoint_every=3",
        "training.eval_batches=1",
    )
    result = train(make_recipe(*changes), run, resume=True, progress=False, device="cpu")
    assert result.steps == 5
    assert "steps: 5" in (run / "recipe.yaml").read_text()


def test_resuming_on_other_text_is_refused(make_recipe: MakeRecipe, text_folder: Path, tmp_path: Path) -> None:
    text = shutil.copytree(text_folder, tmp_path / "text")
    recipe = make_recipe(f"training.task={{type: text, folder: '{text}'}}")
    train(recipe, tmp_path / "run", stop_after=1, progress=False, device="cpu")
    (text / "part07.txt").write_text("something else")
    with pytest.raises(ValueError, match=r"task\.folder: expected the text this run began with"):
        train(recipe, tmp_path / "run", resume=True, progress=False)


@pytest.mark.parametrize("stop_after", [0, 2, 5])
def test_stopping_before_the_next_step_or_after_the_last_is_refused(
    stop_after: int, run: Path, make_recipe: MakeRecipe
) -> None:
    with pytest.raises(ValueError, match=rf"stop_after: expected a step from 3 to 4 .* got {stop_after}"):
        train(make_recipe("training.steps=4"), run, resume=True, stop_after=stop_after, progress=False)


def test_bad_data_or_devices_leave_no_folder_behind(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    for recipe, device, message in (
        (make_recipe("training.task={type: text, folder: nowhere}"), None, r"task\.folder: expected .*nowhere"),
        (make_recipe(), "gpu", r"device: expected a name such as cpu"),
        (make_recipe(), "meta", r"device: expected cpu or cuda"),
    ):
        with pytest.raises(ValueError, match=message):
            train(recipe, tmp_path / "new", device=device, progress=False)
        assert not (tmp_path / "new").exists()
