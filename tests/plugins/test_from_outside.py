"""The parts of docs/extending.md, each a file from outside the package, in every use and mistyped."""

import re
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
import torch

from statemix.cli import main
from statemix.harness import check_mixer
from statemix.mixers import StateError
from statemix.plugins import load_file, load_installed
from statemix.recipes import RecipeError, build, load
from statemix.training import load_model, train

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
FILES = dict(re.findall(r'^```python title="([\w.]+)"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL))

# What a recipe with one part from outside says of it.
PARTS = {
    "diagonal.py": ("mixer: {type: diagonal, conv_size: 3}", "mlp: {type: swiglu, width: 16}", "norm: rms"),
    "squared_relu.py": ("mixer: {type: attention, num_heads: 2}", "mlp: {type: squared_relu, width: 24}", "norm: rms"),
    "layer_norm.py": (
        "mixer: {type: attention, num_heads: 2}",
        "mlp: {type: swiglu, width: 16}",
        "norm: {type: layer, bias: false}",
    ),
}
RECIPE = """\
name: mine
plugins: [FILE]
model: {vocab_size: 256, hidden_size: 16, NORM}
layers:
  mine:
    MIXER
    MLP
stack: mine*2
training: {task: text, seq_len: 16, batch_size: 2, steps: 3, warmup_steps: 0, eval_batches: 1}
"""


def write(folder: Path, file: str) -> Path:
    """The file and a recipe with its part, in a folder."""
    (folder / file).write_text(FILES[file])
    (folder / "other.py").write_text("")
    mixer, mlp, norm = PARTS[file]
    recipe = folder / "mine.yaml"
    recipe.write_text(RECIPE.replace("FILE", file).replace("MIXER", mixer).replace("MLP", mlp).replace("NORM", norm))
    return recipe


@pytest.mark.parametrize("file", PARTS)
def test_a_part_in_a_file_is_trained_resumed_shown_and_generated_from(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(FILES[file].splitlines()) < 40
    monkeypatch.setattr("statemix.tasks.token_stream.NEW_TOKENS", 3)
    recipe, out = write(tmp_path, file), tmp_path / "run"
    command = ["train", str(recipe), "--device", "cpu", "--out", str(out)]
    assert main([*command, "--stop-after", "2"]) == 0
    assert main([*command, "--resume"]) == 0
    assert main(["generate", str(out), "--prompt", "a", "--tokens", "2"]) == 0
    capsys.readouterr()
    assert main(["show", str(recipe)]) == 0
    assert ("s_t = a_t s_{t-1} + (1 - a_t) x_t" in capsys.readouterr().out) == (file == "diagonal.py")
    whole = tmp_path / "whole"
    train(load(recipe), whole, device="cpu", progress=False)
    first, second = load_model(out), load_model(whole)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


MIXER, MLP, NORM = "layers.mine.mixer", "layers.mine.mlp", "model.norm"
UNKNOWN = "unknown key; expected one of type,"
MISTYPED = [
    (
        "diagonal.py",
        "conv_size: 3 -> conv_sise: 3",
        f"6:29: {MIXER}.conv_sise: {UNKNOWN} conv_size; did you mean",
    ),
    ("diagonal.py", "conv_size: 3 -> conv_size: true", f"6:40: {MIXER}.conv_size: expected an integer, got true"),
    (
        "diagonal.py",
        "type: diagonal -> type: diagnal",
        f"6:19: {MIXER}.type: expected one of attention, state, diag",
    ),
    ("diagonal.py", "type: diagonal -> type: diagnal", "got 'diagnal'; did you mean diagonal?"),
    ("squared_relu.py", "width: 24 -> widht: 24", f"7:31: {MLP}.widht: {UNKNOWN} width; did you mean width?"),
    ("squared_relu.py", "width: 24 -> width: 0", f"7:38: {MLP}.width: expected more than 0, got 0"),
    (
        "squared_relu.py",
        "relu, w -> rely, w",
        f"7:17: {MLP}.type: expected one of swiglu, squared_relu, got",
    ),
    ("layer_norm.py", "bias: false -> bais: false", f"3:63: {NORM}.bais: {UNKNOWN} bias; did you mean bias?"),
    ("layer_norm.py", "type: layer -> type: layr", f"3:56: {NORM}.type: expected one of rms, layer, got 'layr'; did"),
    ("layer_norm.py", "{type: layer, bias: false} -> lay", f"3:49: {NORM}: expected one of rms, layer, got 'lay'; did"),
    ("layer_norm.py", "plugins: [layer_norm.py] -> source: none", f"3:56: {NORM}.type: expected rms, got 'layer'"),
    (
        "layer_norm.py",
        "plugins: [layer_norm.py] -> source: none",
        "; for your own norm name its file under plugins",
    ),
]


@pytest.mark.parametrize(("file", "change", "message"), MISTYPED)
def test_a_mistyped_part_is_refused_with_line_and_key(file: str, change: str, message: str, tmp_path: Path) -> None:
    recipe, (old, new) = write(tmp_path, file), change.split(" -> ")
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        load(recipe)
    assert message in str(caught.value)


POWER = """\
from typing import Literal

from statemix.mixers import FEATURE_MAPS, FeatureMap
from statemix.plugins import PartConfig


@FEATURE_MAPS.register
class Power(FeatureMap):
    is_non_negative = True

    class Config(PartConfig):
        type: Literal["power"] = "power"
        of: int = 2

    def __init__(self, size, *, of):
        super().__init__(size)
        if of % 2:
            raise ValueError(f"of: expected an even number, got {of}; odd powers keep signs")
        self.of = of

    def forward(self, x):
        return x**self.of
"""


def test_a_feature_map_in_a_file_has_options_and_may_be_summed(tmp_path: Path) -> None:
    recipe = write(tmp_path, "squared_relu.py")
    (tmp_path / "power.py").write_text(POWER)
    state = "{type: state, num_heads: 2, key_dim: 8, value_dim: 8, transition: gla, is_normalized: true, MAP}"
    text = recipe.read_text().replace("{type: attention, num_heads: 2}", state).replace("[sq", "[power.py, sq")
    recipe.write_text(text.replace("MAP", "feature_map: {type: power, of: 4}"))
    loaded = load(recipe)
    assert build(loaded).blocks[0].mixer.query_map.of == 4  # type: ignore[union-attr]
    assert load(loaded.model_dump()) == loaded
    recipe.write_text(text.replace("MAP", "feature_map: {type: power, of: 3}"))
    with pytest.raises(RecipeError, match="layers.mine.mixer: of: expected an even number, got 3"):
        load(recipe)


def test_a_mixer_with_a_vector_state_passes_every_check_of_a_mixer(tmp_path: Path) -> None:
    write(tmp_path, "diagonal.py")
    cls = load_file(tmp_path / "diagonal.py").module.Diagonal
    report = check_mixer(lambda: cls(cls.Config(conv_size=3), hidden_size=6), hidden_size=6, seq_len=19)
    assert report.ok, report


def test_a_state_of_another_layer_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "diagonal.py")
    cls = load_file(tmp_path / "diagonal.py").module.Diagonal
    mixer, other = (cls(cls.Config(conv_size=size), hidden_size=6) for size in (3, 4))
    with pytest.raises(StateError, match=r"state.conv: expected shape \[2, 2, 6\], got \[2, 3, 6\]"):
        mixer(torch.ones(2, 1, 6), other.empty_state(2, torch.ones(1)))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages; what stands in it is loaded anew."""
    monkeypatch.syspath_prepend(tmp_path)
    load_installed.cache_clear()
    yield tmp_path
    load_installed.cache_clear()


def install(folder: Path, name: str, text: str) -> None:
    """A package with one module, named as a plugin."""
    (folder / f"{name}.py").write_text(text)
    (folder / f"{name}-1.0.dist-info").mkdir()
    (folder / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(f"[statemix.plugins]\nmine = {name}\n")
    assert PathDistribution(folder / f"{name}-1.0.dist-info").entry_points


def test_an_installed_package_brings_its_parts_without_being_named(installed: Path) -> None:
    install(installed, "outside_diagonal", FILES["diagonal.py"])
    recipe = write(installed, "diagonal.py")
    recipe.write_text(recipe.read_text().replace("plugins: [diagonal.py]\n", ""))
    assert load(recipe).layers["mine"].mixer.type == "diagonal"


def test_an_installed_package_that_cannot_be_used_is_named(installed: Path) -> None:
    install(installed, "outside_broken", "import not_installed_anywhere\n")
    with pytest.raises(
        RecipeError, match="plugin of outside_broken: expected a plugin at its entry point mine = .*mend"
    ):
        load("quickstart")
