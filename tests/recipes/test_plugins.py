"""Plugins of a recipe: where they are found, what they bring, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from statemix.recipes import Recipe, RecipeError, build, load

GATE = """\
from statemix.transitions import LogDecay, Transition


class ToyGate(Transition):
    gate: LogDecay

    def apply(self, state):
        return self.gate.exp()[..., None, None] * state
"""

USE = "layers.delta.mixer.transition=toy_gate"

Load = Callable[..., Recipe]
Refusal = Callable[..., str]


@pytest.fixture(autouse=True)
def plugin_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """toy.py beside the recipe, other/toy.py with another text, and a registry that is as it was afterwards."""
    (tmp_path / "other").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "toy.py").write_text(GATE)
    (tmp_path / "other" / "toy.py").write_text(GATE + "\n")
    (tmp_path / "broken.py").write_text(GATE.replace("LogDecay", "LogDecoy"))
    monkeypatch.chdir(tmp_path / "elsewhere")


def test_a_recipe_names_files_beside_itself(load_text: Load, tmp_path: Path) -> None:
    recipe = load_text("stack: -> plugins: [toy.py]\nstack:", "transition: householder -> transition: toy_gate")
    assert recipe.plugins == [str(tmp_path / "toy.py")]
    assert build(recipe).blocks[0].mixer.formula == "ToyGate"  # type: ignore[union-attr]


def test_files_from_the_command_line_lie_in_the_current_folder(load_text: Load, tmp_path: Path) -> None:
    recipe = load(load_text().model_dump(), [USE], plugins=["../toy.py"])
    assert recipe.plugins == [str(tmp_path / "toy.py")]


def test_what_is_written_out_loads_to_an_equal_recipe(load_text: Load, tmp_path: Path) -> None:
    recipe = load_text("stack: -> plugins: [toy.py]\nstack:", "transition: householder -> transition: toy_gate")
    (tmp_path / "elsewhere" / "written.yaml").write_text(recipe.to_yaml())
    assert load("written.yaml") == recipe
    assert load(recipe.model_dump()) == recipe


def test_overrides_may_name_plugins_and_options_of_their_transitions(load_text: Load, tmp_path: Path) -> None:
    assert load_text(overrides=["plugins=[toy.py]", USE]).plugins == [str(tmp_path / "toy.py")]
    named = load_text(
        "stack: -> plugins: [toy.py]\nstack:",
        "transition: householder -> transition: toy_gate",
        overrides=["layers.delta.mixer.transition.type=gla"],
    )
    assert named.layers["delta"].mixer.transition[0].type == "diagonal_gate"  # type: ignore[union-attr]


def test_the_same_file_twice_is_one(load_text: Load, tmp_path: Path) -> None:
    data = load_text("stack: -> plugins: [toy.py]\nstack:").model_dump()
    (tmp_path / "elsewhere" / "toy.py").write_text(GATE)
    assert load(data, [USE], plugins=["toy.py", "../toy.py"]).plugins == [str(tmp_path / "toy.py")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["stack: -> plugins: [absent.py]\nstack:"], ["small.yaml:10:11", "plugins.0", "absent.py", "Python file"]),
        (["stack: -> plugins: [toy.py, broken.py]\nstack:"], ["plugins.1", "broken.py:1:", "ImportError", "1 | from"]),
        (["stack: -> plugins: [toy.py, other/toy.py]\nstack:"], ["plugins.1", "different names", "rename one"]),
        (["stack: -> plugins: toy.py\nstack:"], ["plugins", "expected a list"]),
        (["stack: -> plugins: [3]\nstack:"], ["plugins.0", "expected a text"]),
        (["transition: householder -> transition: toy_gate"], ["'toy_gate'", "under plugins", "--plugin"]),
    ],
    ids=str,
)
def test_a_plugin_that_cannot_be_used_is_named(refusal: Refusal, changes: list[str], named: list[str]) -> None:
    message = refusal(*changes)
    for part in named:
        assert part in message, message


def test_a_file_from_the_command_line_that_cannot_be_used_is_named(load_text: Load, tmp_path: Path) -> None:
    data = load_text("stack: -> plugins: [toy.py]\nstack:").model_dump()
    for file, named in (("../broken.py", "broken.py:1: ImportError"), ("../other/toy.py", "expected the text of")):
        with pytest.raises(RecipeError, match=f"plugin {tmp_path}.*{named}"):
            load(data, plugins=[file])
