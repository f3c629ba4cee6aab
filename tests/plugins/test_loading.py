"""A file of one's own: what is run, what is run again, and which line an error shows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from statemix.plugins import PluginError, has_run, load_file, run_file
from statemix.transitions.modules.plugin import transitions_of

GATE = """\
from statemix.transitions import LogDecay, Transition


class ToyGate(Transition):
    gate: LogDecay

    def apply(self, state):
        return self.gate.exp()[..., None, None] * state
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write(text, name) -> path."""

    def to_file(text: str, name: str = "toy.py") -> Path:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        return file

    return to_file


def test_loading_again_or_loading_a_copy_gives_the_same_classes(write: Write) -> None:
    first = transitions_of(load_file(write(GATE)))
    assert transitions_of(load_file(write(GATE))) == first
    assert transitions_of(load_file(write(GATE, "copy/toy.py"))) == first


NORMS = """\
from typing import Literal
from statemix.blocks import NORMS
from statemix.plugins import PartConfig
from torch import nn
"""

NORM = """

@NORMS.register
class {name}(nn.Module):
    class Config(PartConfig):
        type: Literal["quiet"] = "quiet"
    def __init__(self, config, *, size, eps):
        super().__init__()
    def forward(self, x):
        return x
    def reset_parameters(self):
        pass
"""


def test_a_file_with_two_classes_of_one_name_leaves_none_and_a_changed_file_can_run_again(
    write: Write,
) -> None:
    with pytest.raises(PluginError, match="Second: expected a new name, got 'quiet', that of First"):
        load_file(write(NORMS + NORM.format(name="First") + NORM.format(name="Second")))
    for name in ("First", "Renamed"):  # under the name that the file which failed had taken before it failed
        load_file(write(NORMS + NORM.format(name=name), "other.py"))


def test_a_run_file_leaves_nothing_beside_it(write: Write, tmp_path: Path) -> None:
    load_file(write(GATE))
    assert [path.name for path in tmp_path.iterdir()] == ["toy.py"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GATE.replace("gate: LogDecay", "gate: LogDecoy"), [":5:", "NameError", "LogDecoy", "5 |     gate: LogDecoy"]),
        (GATE.replace("class ToyGate(Transition):", "class ToyGate(Transition"), [":4:", "SyntaxError", "4 | class"]),
        (
            "import torch\nimport not_installed_anywhere\n",
            [":2:", "not_installed_anywhere", "install it", "2 | import"],
        ),
        ("def fail():\n    raise KeyError('x')\n\nfail()\n", [":2:", "KeyError", "2 |     raise KeyError"]),
        ("import sys\nsys.exit(3)\n", [":2:", "SystemExit"]),
        ("import json\njson.loads('{')\n", [":2:", "JSONDecodeError", "2 | json.loads"]),
        ("x = 1\n", ["toy.py: expected a class", "Transition", "none"]),
        (GATE.replace("apply", "aply"), [":4:", "ToyGate", "apply(self, state)", "4 | class ToyGate"]),
        (GATE.replace("ToyGate", "Identity"), [":4:", "identity", "rename"]),
        (GATE.replace("gate: LogDecay", "gate: int"), [":4:", "ToyGate.gate", "kind"]),
        ("from __future__ import annotations\n" + GATE.replace(": LogDecay", ": LogDecoy"), [":5:", "LogDecoy"]),
    ],
    ids=lambda value: None,
)
def test_a_file_that_cannot_be_used_is_named_with_its_line(write: Write, text: str, named: list[str]) -> None:
    file = write(text)
    with pytest.raises(PluginError) as caught:
        load_file(file)
    message = str(caught.value)
    assert message.startswith(f"{file}:")
    for part in named:
        assert part in message


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.py", tmp_path):
        with pytest.raises(PluginError, match=f"{path}: expected a Python file"):
            run_file(path)


def test_a_file_that_failed_can_be_mended(write: Write) -> None:
    with pytest.raises(PluginError):
        load_file(write(GATE.replace("LogDecay", "LogDecoy")))
    assert list(transitions_of(load_file(write(GATE)))) == ["ToyGate"]


def test_the_text_of_a_file_is_known_once_it_has_run(write: Write) -> None:
    file = write(GATE)
    assert not has_run(file)
    load_file(file)
    assert has_run(file) and has_run(write(GATE, "copy/other.py")) and not has_run(write(GATE + "x = 1\n"))
