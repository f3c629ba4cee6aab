"""FILE.py:Class from a user's hand: what is found, what is refused, and the lines that are shown."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from statemix.cli import main
from statemix.harness import CATALOGUE, HarnessError, Sizes
from statemix.harness.recurrence_checks.lowering import normal_form_matrix
from statemix.harness.user_file import check_file, list_checks, load_transition

TOY = """\
import torch
from statemix.kernels import NormalForm
from statemix.transitions import LogDecay, Rate, Transition, UnitKey


class Toy(Transition):
    gate: LogDecay
    key: UnitKey
    beta: Rate

    @property
    def natural_write(self):
        return self.beta

    def apply(self, state):
        removed = (state @ self.key.unsqueeze(-1)).squeeze(-1)
        erased = self.beta[..., None, None] * removed[..., :, None] * self.key[..., None, :]
        return self.gate.exp()[..., None, None] * (state - erased)

    def lower(self):
        key = self.expand_heads(self.beta.shape[-1]).key
        return NormalForm(self.gate, erase=(self.beta[..., None] * key, self.key))

    @classmethod
    def example(cls, batch, seq_len, num_heads, key_dim, generator=None):
        return super().example(batch, seq_len, num_heads, key_dim, generator)
"""

FAST = ["lower_is_apply", "apply_is_linear", "forms_equal_the_definition"]

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """write("old -> new", ...) -> the target of the toy with these changes."""

    def to_file(*changes: str, name: str = "Toy") -> str:
        text = TOY
        for change in changes:
            old, new = change.split(" -> ")
            assert old in text
            text = text.replace(old, new, 1)
        (tmp_path / "toy.py").write_text(text)
        return f"{tmp_path}/toy.py:{name}"

    return to_file


def refusal(target: str) -> str:
    with pytest.raises(HarnessError) as caught:
        check_file(target, only=FAST)
    return str(caught.value)


def test_a_right_class_passes_and_its_name_may_be_left_out(write: Write) -> None:
    target = write()
    assert load_transition(target).__name__ == "Toy"
    assert load_transition(target.removesuffix(":Toy")) is load_transition(target)
    report = check_file(target, only=FAST, seq_len=9)
    assert report.ok and [result.check for result in report.results if result.check == FAST[0]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["(state @ self -> (stat @ self"], ["Toy.apply", "NameError", "toy.py:16", "16 | removed = (stat @"]),
        (["self.beta[..., None, None] -> self.beta"], ["Toy.apply", "RuntimeError", "toy.py:17", "17 | erased"]),
        (
            ["return self.gate.exp()[..., None, None] * (state - erased) -> return removed"],
            [
                "Toy.apply",
                "expected a state of [2, 4, 5, 8] = [B, HV, V, K]",
                "got [2, 4, 5]",
                "18 |         return rem",
            ],
        ),
        (
            ["return self.gate.exp()[..., None, None] * (state -> self.gate.exp()[..., None, None] * (state"],
            ["NoneType"],
        ),
        (["[..., None, None] * (state -> [:, :, None, None] * (state"], ["all tokens at once", "18 | "]),
        (["generator)\n -> generator).at(0)\n"], ["Toy.gate", "[2, 37, 4] = [B, T, HV]", "got [2, 4]", "time axis T"]),
        (["generator)\n -> generator).x\n"], ["Toy.example", "AttributeError", "26 | "]),
        (["return self.beta\n -> return self.beta.sum(1)\n"], ["Toy.natural_write", "[2, 37, 4]", "13 | "]),
        (["self.beta[..., None] * key -> self.beta * key"], ["Toy.lower", "22 | return NormalForm", "RuntimeError"]),
        (["self.beta[..., None] * key -> self.beta"], ["Toy.lower", "erase[0]", "[2, 37, 4, 8]", "got [2, 37, 4]"]),
        (["NormalForm(self.gate -> NormalForm(-self.gate"], ["Toy.lower", "log_decay <= 0"]),
        (["return NormalForm( -> return dict(log_decay="], ["Toy.lower"]),
        (["beta: Rate -> beta: torch.Tensor"], ["Toy.example", "'beta'", "no kind"]),
        (["def apply -> def aply"], ["Toy: expected a method apply(self, state)"]),
        (["import torch -> import troch"], ["toy.py:1", "ModuleNotFoundError", "1 | import troch"]),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_its_lines(write: Write, changes: list[str], named: list[str]) -> None:
    message = refusal(write(*changes))
    for part in named:
        assert part in message, message


def test_unknown_classes_files_and_checks_list_what_there_is(write: Write, tmp_path: Path) -> None:
    assert "which are: Toy; got no such class; did you mean Toy?" in refusal(write(name="Toi"))
    assert "got module torch, which is no Transition" in refusal(write(name="torch"))
    assert "absent.py: expected a Python file" in refusal(f"{tmp_path}/absent.py:Toy")
    with pytest.raises(HarnessError, match="expected one of apply_keeps_the_shape"):
        check_file(write(), only=["chunks"])


@pytest.mark.parametrize(
    "change",
    [
        "NormalForm(self.gate -> NormalForm(0.99 * self.gate",
        "self.beta[..., None] * key, self.key -> self.beta[..., None] * key, 1.001 * self.key",
        "self.key)) -> self.key), reads_before_decay=True)",
        "NormalForm(self.gate -> NormalForm(None",
    ],
)
def test_a_lower_that_contradicts_apply_is_said_first_and_alone(write: Write, change: str) -> None:
    report = check_file(write(change))
    [(check, message)] = report.failures
    assert check == "lower_is_apply" and len(report.results) == 1
    assert "lower() disagrees with apply(): M_t[" in message and "head" in message
    assert "20 |     def lower(self):" in message and "reproduce: statemix check" in str(report)


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_matrix_of_a_normal_form_is_that_of_the_transition(name: str) -> None:
    sizes = Sizes(seq_len=3)
    transition = CATALOGUE[name].make(sizes, torch.Generator().manual_seed(0)).transition
    like = torch.zeros(2, 3, 4, 8, 8, dtype=torch.float64)
    matrix = transition.materialize(8).to(like).expand_as(like)
    torch.testing.assert_close(normal_form_matrix(transition.lower(), like), matrix, rtol=0, atol=1e-14)


def test_the_command_tells_passing_failing_and_bad_input_apart(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", write(), "--only", *FAST, "--seq-len", "5", "--seed", "2"]) == 0
    assert "Toy: 3 passed, 0 failed" in capsys.readouterr().out
    assert main(["check", write("NormalForm(self.gate -> NormalForm(None")]) == 1
    assert "LOWER" not in capsys.readouterr().out
    for arguments in ([write(name="Toi")], [write(), "--only", "no_such_check"], []):
        assert main(["check", *arguments]) == 2
        assert capsys.readouterr().err.startswith("statemix: ")


def test_every_check_is_listed_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--list"]) == 0
    listed = capsys.readouterr().out
    assert listed.strip() == list_checks()
    assert "lower_is_apply" in listed and "any_length_is_right" in listed and "(slow)" in listed


@pytest.mark.slow
def test_all_checks_of_a_right_class_pass(write: Write) -> None:
    report = check_file(write(), include_slow=True)
    assert report.ok, report
