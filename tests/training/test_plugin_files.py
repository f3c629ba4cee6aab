"""A run folder holds copies of the plugins of its recipe, and rebuilds its model from them alone."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from statemix.cli import main
from statemix.plugins import loading
from statemix.recipes import Recipe, RecipeError, build, load
from statemix.training import Interrupted, load_model, plugins_of_run, save_model, train
from statemix.transitions import TRANSITIONS

MakeRecipe = Callable[..., Recipe]

GATE = """\
from statemix.transitions import LogDecay, Transition


class ToyGate(Transition):
    gate: LogDecay

    def apply(self, state):
        return self.gate.exp()[..., None, None] * state
"""
CHANGED = GATE.replace("* state", "* state / 2")

IN_A_NEW_PROCESS = """
import sys, torch
from statemix.training import Interrupted, load_model
print(load_model(sys.argv[1], trust_plugins=True)(torch.arange(9)[None])[0].double().sum().item())
"""


@pytest.fixture
def recipe(make_recipe: MakeRecipe, tmp_path: Path) -> Recipe:
    """The tiny recipe with the transition of a plugin."""
    (tmp_path / "toy.py").write_text(GATE)
    data = make_recipe().model_dump()
    return load(data, ["layers.delta.mixer.transition=toy_gate"], plugins=[tmp_path / "toy.py"])


def moved(folder: Path) -> Path:
    """The folder under another name, with the plugin's original gone."""
    (folder.parent / "toy.py").unlink()
    return folder.rename(folder.parent / "moved")


def test_a_run_folder_rebuilds_its_model_alone(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run", device="cpu", progress=False)
    folder = moved(tmp_path / "run")
    assert "plugins: [toy.py]" in (folder / "recipe.yaml").read_text()
    assert str(tmp_path) not in (folder / "recipe.yaml").read_text().split("training")[0]
    assert plugins_of_run(folder) == [folder / "toy.py"]
    here = load_model(folder)(torch.arange(9)[None])[0].double().sum().item()
    command = [sys.executable, "-P", "-c", IN_A_NEW_PROCESS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout) - here) <= 1e-4 * abs(here)  # float32, another process


def test_a_saved_model_carries_its_plugins(recipe: Recipe, tmp_path: Path) -> None:
    model = build(recipe).eval()
    save_model(model, tmp_path / "saved")
    loaded = load_model(moved(tmp_path / "saved"))
    save_model(loaded, tmp_path / "again")
    again = load_model(tmp_path / "again")
    tokens = torch.arange(9)[None]
    assert torch.equal(again(tokens)[0], model(tokens)[0])


def test_a_run_goes_on_with_the_original_and_with_its_copy(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(recipe, folder, stop_after=2, device="cpu", progress=False)
    train(recipe, folder, stop_after=4, resume=True, device="cpu", progress=False)
    assert Interrupted(4, folder).command.endswith("--resume --trust-plugins")
    assert train(load(folder / "recipe.yaml"), folder, resume=True, device="cpu", progress=False).steps == 6


def test_a_run_does_not_go_on_with_another_text_of_its_plugin(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run", stop_after=2, device="cpu", progress=False)
    (tmp_path / "toy.py").write_text(CHANGED)
    changed = load(recipe.model_dump())
    with pytest.raises(ValueError, match="plugins: expected toy.py as it was when the run began"):
        train(changed, tmp_path / "run", resume=True, device="cpu", progress=False)
    assert (tmp_path / "run" / "toy.py").read_text() == GATE


def test_two_texts_of_one_plugin_live_side_by_side(recipe: Recipe, tmp_path: Path) -> None:
    """Two runs of a file that was changed in between: each folder gives its own model."""
    torch.manual_seed(0)
    save_model(build(recipe), tmp_path / "before")
    (tmp_path / "toy.py").write_text(CHANGED)
    torch.manual_seed(0)
    save_model(build(load(recipe.model_dump())), tmp_path / "after")
    tokens = torch.arange(9)[None]
    names = ("before", "after", "before")
    before, after, again = (load_model(tmp_path / name, trust_plugins=True)(tokens)[0] for name in names)
    assert torch.equal(before, again) and not torch.equal(before, after)


def test_the_command_line_trains_resumes_and_compares(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("toy.py").write_text(GATE)
    Path("tiny.yaml").write_text(make_recipe().to_yaml())
    use = ["tiny.yaml", "layers.delta.mixer.transition=toy_gate", "--device", "cpu", "--out", "run"]
    assert main(["train", *use]) == 2
    assert "--plugin" in capsys.readouterr().err
    assert not Path("run").exists()
    assert main(["train", *use, "--plugin", "toy.py", "--stop-after", "3"]) == 0
    assert main(["train", *use, "--stop-after", "4", "--resume", "--plugin", "toy.py"]) == 0
    assert main(["train", *use, "--resume", "--trust-plugins"]) == 0
    assert main(["generate", "run", "--prompt", "a", "--tokens", "2"]) == 0
    assert main(["show", "tiny.yaml", "layers.delta.mixer.transition=toy_gate", "--plugin", "toy.py"]) == 0
    assert "ToyGate" in capsys.readouterr().out
    compared = ["--out", "both", "--compare", "tiny.yaml", "--plugin", "toy.py", "training.steps=2"]
    assert main(["train", *use[:4], *compared]) == 0
    assert Path("both", "toy.py").read_text() == Path("both", "versus-tiny", "toy.py").read_text() == GATE


@pytest.fixture
def foreign_run(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was made elsewhere: its plugin, which leaves a mark, has not run in this process."""
    mark = tmp_path / "mark"
    (tmp_path / "toy.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n{GATE}")
    folder = tmp_path / "elsewhere" / "run"
    train(load(recipe.model_dump()), folder, stop_after=2, device="cpu", progress=False)
    mark.unlink()
    monkeypatch.setattr(loading, "_PLUGINS", {})
    monkeypatch.setattr(loading, "_SOURCES", set())
    monkeypatch.delitem(TRANSITIONS._classes, "toy_gate")
    monkeypatch.chdir(tmp_path)
    return folder


def test_no_command_runs_the_code_of_a_run_folder_unasked(
    foreign_run: Path, make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tiny.yaml").write_text(make_recipe().to_yaml())
    recipe, out = str(foreign_run / "recipe.yaml"), ["--out", str(foreign_run), "--resume", "--device", "cpu"]
    commands = {
        "show": ["show", recipe],
        "generate": ["generate", str(foreign_run), "--prompt", "a", "--tokens", "2"],
        "profile": ["profile", recipe, "--steps", "1", "--device", "cpu", "--out", "profiled"],
        "resume": ["train", recipe, *out],
        "resume with another recipe": ["train", "tiny.yaml", "layers.delta.mixer.transition=toy_gate", *out],
        "compare": ["train", "tiny.yaml", "--compare", recipe, "--out", "both"],
    }
    for name, command in commands.items():
        assert main(command) == 2, name
        message = capsys.readouterr().err
        assert "toy.py" in message and "--trust-plugins" in message, name
        assert not Path("mark").exists(), name
    assert main([*commands["generate"], "--trust-plugins"]) == 0
    assert Path("mark").exists()


def test_a_run_goes_on_with_the_same_plugin_given_by_the_user(foreign_run: Path) -> None:
    recipe = load(foreign_run / "recipe.yaml", trust_plugins=True).model_dump()
    mine = load({**recipe, "plugins": ["toy.py"]})
    assert train(mine, foreign_run, resume=True, device="cpu", progress=False).steps == 6


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("place", ["../evil.py", "absolute", "link.py", "${name}.py"])
def test_a_plugin_outside_a_run_folder_is_refused_whatever_is_trusted(
    foreign_run: Path, place: str, trust: bool
) -> None:
    evil = foreign_run.parent / "evil.py"
    evil.write_text("raise AssertionError('this has run')")
    (foreign_run / "link.py").symlink_to(evil)
    named = str(evil) if place == "absolute" else place
    text = (foreign_run / "recipe.yaml").read_text()
    (foreign_run / "recipe.yaml").write_text(text.replace("plugins: [toy.py]", f"plugins: ['{named}']"))
    with pytest.raises(RecipeError, match="expected (a file in the run folder|the names of files in a run folder)"):
        load_model(foreign_run, trust_plugins=trust)
