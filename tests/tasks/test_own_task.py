"""The task of docs/extending.md, a file from outside the package: in every use, and mistyped."""

import json
import re
from pathlib import Path

import pytest

from statemix.cli import main
from statemix.recipes import RecipeError, load
from statemix.training import compare, train

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"
[INTEGERS] = re.findall(r'^```python title="integers.py"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)

RECIPE = """\
name: counting
plugins: [integers.py]
model: {vocab_size: 10, hidden_size: 16}
layers:
  delta: {mixer: {type: state, num_heads: 1, key_dim: 8, value_dim: 8, transition: householder}}
stack: delta
training:
  task: {type: integers, file: digits.txt}
  seq_len: 9
  batch_size: 2
  steps: 3
  eval_batches: 1
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe, its plugin and its data in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("statemix.tasks.token_stream.NEW_TOKENS", 3)
    Path("integers.py").write_text(INTEGERS)
    Path("counting.yaml").write_text(RECIPE)
    Path("digits.txt").write_text("\n".join(str(number * number % 10) for number in range(700)))


def test_the_file_is_under_forty_lines() -> None:
    assert len(INTEGERS.splitlines()) < 40


def test_it_is_shown_trained_resumed_and_generated_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "counting.yaml"]) == 0
    assert main(["train", "counting.yaml", "--out", "run", "--device", "cpu", "--stop-after", "2"]) == 0
    assert main(["train", "counting.yaml", "--out", "run", "--device", "cpu", "--resume"]) == 0
    printed = capsys.readouterr()
    assert "counting: held-out bits per integer" in printed.out and "bits/integer" in printed.err
    result = json.loads(Path("run/result.json").read_text())
    assert result["heldout_metric"] == "bits_per_integer" and result["steps"] == 3
    assert re.fullmatch(r"0 1 4 9 6 5 6 9 4 1( \d)+", result["sample"])  # the first held-out square is that of 630
    straight = train(load("counting.yaml"), "straight", device="cpu", progress=False)
    assert straight.heldout_value == result["heldout_value"]
    assert main(["generate", "run", "--prompt", "0 1 4", "--tokens", "4"]) == 0
    assert re.fullmatch(r"0 1 4( \d){4}\n", capsys.readouterr().out)
    for prompt, named in (
        ("0 one", "prompt: invalid literal"),
        ("3 10", "prompt: expected one or more tokens from 0 to 9, got [3, 10]"),
        (" ", "prompt: expected one or more tokens from 0 to 9, got []"),
    ):
        assert main(["generate", "run", "--prompt", prompt]) == 2
        assert named in capsys.readouterr().err


def test_the_better_of_two_is_the_lower() -> None:
    recipe = load("counting.yaml")
    comparison = compare(recipe, load("counting.yaml", ["name=rival"]), "both", device="cpu", progress=False)
    assert "held-out bits per integer" in comparison.table() and "* better (lower)" in comparison.table()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "integers,",
            "integer,",
            "16: training.task.type: expected one of text, mqar, parity, integers, got 'integer'",
        ),
        ("file:", "fil:", "26: training.task.fil: unknown key; expected one of type, file; did you mean file?"),
        ("file: digits.txt", "file: 7", "32: training.task.file: expected a text, got 7; quote it"),
        (", file: digits.txt", "", "3: training.task.file: missing key (integers with spaces or line ends"),
    ],
)
def test_a_mistyped_recipe_is_refused_with_line_and_key(old: str, new: str, message: str) -> None:
    Path("counting.yaml").write_text(RECIPE.replace(old, new))
    with pytest.raises(RecipeError) as refused:
        load("counting.yaml")
    assert str(refused.value).startswith(f"counting.yaml:8:{message}")


def test_data_that_do_not_fit_refuse_the_run_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for overrides, named in (
        (["model.vocab_size=9"], "model.vocab_size: expected 10 or more for task integers"),
        (["training.seq_len=70"], "training.seq_len: expected less than"),
        (["training.task.file=nowhere.txt"], "nowhere.txt"),
    ):
        assert main(["train", "counting.yaml", "--out", "run", *overrides]) == 2
        assert named in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_run_does_not_go_on_with_other_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "counting.yaml", "--out", "run", "--device", "cpu", "--stop-after", "2"]) == 0
    Path("digits.txt").write_text("1 2 3 " * 200)
    assert main(["train", "counting.yaml", "--out", "run", "--device", "cpu", "--resume"]) == 2
    assert "training.task: expected the data this run began with" in capsys.readouterr().err


def test_a_task_without_its_data_is_refused_where_it_is_written() -> None:
    Path("integers.py").write_text(INTEGERS.replace("def read", "def reed"))
    with pytest.raises(RecipeError, match=r"(?s)integers\.py:13: Integers: expected a method read as every task has"):
        load("counting.yaml")


def test_what_a_check_refuses_has_line_and_key() -> None:
    check = """
    def check(self):
        if not self.config.file.endswith(".txt"):
            raise ValueError(f"file: expected a name that ends in .txt, got {self.config.file}")
        if self.seq_len > 8:
            self.refuse("file", f"expected shorter windows, got {self.seq_len}")
"""
    Path("integers.py").write_text(INTEGERS + check)
    assert load("counting.yaml", ["training.seq_len=8"]).training.seq_len == 8
    refused = {
        "training.seq_len=9": "counting.yaml:8:32: training.task.file: expected shorter windows, got 9",
        "training.task.file=a.npy": "override training.task.file=a.npy: training.task.file: expected a name that ends",
    }
    for override, message in refused.items():
        with pytest.raises(RecipeError) as error:
            load("counting.yaml", [override])
        assert str(error.value).startswith(message)
