"""The command line: what it refuses, what it writes, and its exit codes."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file

from statemix.cli import main
from statemix.training import Interrupted, NonFiniteError

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("show", "train", "generate", "check", "profile", "bench", "env")

RECIPE = """\
name: tiny
model: {vocab_size: 256, hidden_size: 8}
layers:
  delta: {mixer: {type: state, num_heads: 1, key_dim: 8, value_dim: 8, transition: householder}}
stack: delta
training:
  task: {type: text, folder: text}
  seq_len: 9
  batch_size: 1
  steps: 2
  lr: 1e-3
  warmup_steps: 1
  checkpoint_every: 2
  log_every: 1
  eval_batches: 1
  seed: 0
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny recipe, a text to train it on, an existing folder and an empty one; the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("statemix.tasks.token_stream.NEW_TOKENS", 3)
    Path("tiny.yaml").write_text(RECIPE)
    Path("broken.yaml").write_text("name: tiny\nmodel: {vocab_size: 256\nstack: delta\n")
    for folder in ("text", "taken", "empty"):
        Path(folder).mkdir()
    for number in range(12):
        Path("text", f"{number}.txt").write_text(f"file {number} holds a few words of its own\n" * 4)
    Path("taken", "notes").write_text("not a run")
    return tmp_path


def call(arguments: Sequence[str]) -> int | str | None:
    """The exit code, whether ``main`` returns it or argparse leaves with it."""
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path below the folder, files with their content."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def train_tiny(*arguments: str) -> None:
    assert call(["train", "tiny.yaml", "--device", "cpu", *arguments]) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["show", "missing.yaml"], ["missing.yaml"]),
        (["show", "broken.yaml"], ["broken.yaml", "3"]),
        (["show", "tiny.yaml", "layers.delta.mixer.transiton=gla"], ["transiton", "transition"]),
        (["show", "tiny.yaml", "stack=delat"], ["delat", "delta"]),
        (["show", "tiny.yaml", "--seq-len", "0"], ["--seq-len", "'0'"]),
        (["train", "missing.yaml"], ["missing.yaml"]),
        (["train", "tiny.yaml", "training.steps"], ["training.steps", "value"]),
        (["train", "tiny.yaml", "--out", "taken"], ["taken", "--resume"]),
        (["train", "tiny.yaml", "--out", "text/0.txt"], ["0.txt"]),
        (["train", "tiny.yaml", "--resume", "--out", "empty"], ["empty"]),
        (["train", "tiny.yaml", "--compare", "missing.yaml"], ["missing.yaml"]),
        (["train", "tiny.yaml", "--compare", "tiny.yaml", "--stop-after", "1"], ["--stop-after", "--compare"]),
        (["train", "tiny.yaml", "--stop-after", "99"], ["stop_after", "99"]),
        (["train", "tiny.yaml", "--device", "cpux"], ["device", "cpux"]),
        (["train", "tiny.yaml", "training.task.folder=empty"], ["folder", "empty"]),
        (["train", "tiny.yaml", "--resum"], ["--resum"]),
        (["generate", "nowhere", "--prompt", "x"], ["nowhere"]),
        (["generate", "taken", "--prompt", "x"], ["recipe.yaml", "taken"]),
        (["generate", "taken", "--prompt", ""], ["--prompt"]),
        (["generate", "taken", "--prompt", "x", "--temperature", "nan"], ["--temperature", "nan"]),
        (["generate", "taken", "key=value", "--prompt", "x"], ["key=value"]),
        (["shwo"], ["shwo", "show"]),
        ([], ["COMMAND"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_input_is_named_with_exit_code_2_and_nothing_written(
    arguments: list[str], named: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(workplace)
    assert call(arguments) == 2
    message = capsys.readouterr().err
    assert [name for name in named if name not in message] == []
    assert snapshot(workplace) == before


def test_the_installed_command_refuses_without_a_traceback() -> None:
    command = [Path(sys.executable).with_name("statemix"), "show", "missing.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("statemix: missing.yaml") and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example_that_parses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([command, "--help"]) == 0
    text, example = capsys.readouterr().out.split("example:\n")
    assert text and example.split()[:2] == ["statemix", command]
    # Help is an argument like any other, so it is reached only when what stands before it parses.
    assert call([*shlex.split(example)[1:], "--help"]) == 0


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--version"]) == 0
    assert re.fullmatch(r"statemix \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_show_prints_a_row_a_layer_of_the_recipe_as_overridden(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["show", "tiny.yaml", "--seq-len", "77", "stack=delta*3", "layers.delta.mixer.transition=gla"]) == 0
    table = capsys.readouterr().out
    assert len(re.findall(r"^\| +\d \| delta +\| state +\|.*Diag\(", table, re.MULTILINE)) == 3
    assert "77 tokens" in table


def test_overrides_may_stand_before_and_after_options() -> None:
    train_tiny("training.seed=7", "--out", "run", "training.steps=1", "training.warmup_steps=0")
    recipe = Path("run", "recipe.yaml").read_text()
    assert "seed: 7" in recipe and "steps: 1" in recipe


def test_a_new_run_takes_the_next_free_folder_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("runs/tiny", "runs/tiny-2", "runs/tiny-3"):
        train_tiny()
        assert folder in capsys.readouterr().out
        assert Path(folder, "model.safetensors").is_file()


def test_stopping_and_resuming_ends_with_the_weights_of_one_run() -> None:
    train_tiny("--out", "whole")
    train_tiny("--stop-after", "1")
    train_tiny("--resume")
    whole, pieces = (load_file(Path(folder, "model.safetensors")) for folder in ("whole", "runs/tiny"))
    assert whole.keys() == pieces.keys()
    assert [name for name in whole if not torch.equal(whole[name], pieces[name])] == []


def test_compare_ends_with_both_scores_a_sample_and_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rival.yaml").write_text(RECIPE.replace("name: tiny", "name: rival"))
    train_tiny("--compare", "rival.yaml")
    printed = capsys.readouterr().out
    scores = [json.loads(file.read_text())["heldout_value"] for file in Path("runs").rglob("result.json")]
    assert len(scores) == 2
    assert [f"{score:.4f}" for score in scores if f"{score:.4f}" not in printed] == []
    assert "held-out bits per byte" in printed and "sample" in printed and "runs/tiny" in printed


def test_generate_continues_the_prompt_and_repeats_itself_under_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    train_tiny("--out", "run")
    capsys.readouterr()
    texts = []
    for options in (["--seed", "1"], ["--seed", "1"], ["--seed", "2"], ["--temperature", "0"], ["--top-k", "1"]):
        assert call(["generate", "run", "--prompt", "file 1 \u00e9", "--tokens", "20", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("file 1 \u00e9") for text in texts)
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]


def test_generate_refuses_a_model_that_was_not_trained_on_text(capsys: pytest.CaptureFixture[str]) -> None:
    train_tiny("--out", "run", "training.task={type: mqar, num_pairs: 2}")
    assert call(["generate", "run", "--prompt", "x"]) == 2
    assert "mqar" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(NonFiniteError("step 3: loss is nan"), 1), (Interrupted(3, Path("runs/tiny")), 130)]
)
def test_a_run_that_ends_early_says_why(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end_early(*args: object, **options: object) -> NoReturn:
        raise error

    monkeypatch.setattr("statemix.training.train", end_early)
    assert call(["train", "tiny.yaml"]) == code
    assert str(error) in capsys.readouterr().err


def test_an_interrupted_comparison_says_how_to_go_on_with_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end_early(*args: object, **options: object) -> NoReturn:
        raise Interrupted(3, Path("run/versus-tiny"))

    with monkeypatch.context() as patch:
        patch.setattr("statemix.training.train", end_early)
        patch.setattr("statemix.training.compare", end_early)
        assert call(["train", "tiny.yaml", "--compare", "tiny.yaml", "--out", "run"]) == 130
    command = capsys.readouterr().err.splitlines()[-1].partition("go on with both: ")[2]
    train_tiny("--out", "run")
    assert call(shlex.split(command)[1:]) == 0


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statemix.recipes.load", lambda *args, **options: json.loads("{"))
    with pytest.raises(json.JSONDecodeError):  # a ValueError, but none that statemix raised to refuse its input
        main(["show", "tiny.yaml"])
