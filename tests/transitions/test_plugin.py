"""A user's file of recurrences: which of its classes recipes can name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from statemix.plugins import load_file
from statemix.transitions import TRANSITIONS, transition_names
from statemix.transitions.modules.plugin import transitions_of

GATE = """\
from statemix.transitions import LogDecay, Transition


class ToyGate(Transition):
    gate: LogDecay

    def apply(self, state):
        return self.gate.exp()[..., None, None] * state
"""

OWN_MODULE = GATE.replace(
    "import LogDecay", "import FactorConfig, IdentityModule, LogDecay, register, TransitionModule"
) + (
    """

@register
class Own(IdentityModule):
    formula = "mine"

    class Config(FactorConfig):
        type: __import__("typing").Literal["toy_gate"] = "toy_gate"
"""
)

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


def test_every_transition_of_a_file_is_registered(write: Write) -> None:
    two = GATE + GATE.replace("ToyGate", "OtherGate").split("\n", 1)[1]
    plugin = load_file(write(two))
    assert list(transitions_of(plugin)) == ["ToyGate", "OtherGate"]
    assert {"toy_gate", "other_gate"} <= set(transition_names())


def test_a_changed_file_takes_over(write: Write) -> None:
    first = transitions_of(load_file(write(GATE)))["ToyGate"]
    second = transitions_of(load_file(write(GATE.replace("* state", "* state * 1"))))["ToyGate"]
    known = TRANSITIONS.get("toy_gate")
    assert second is not first and known is not None and known.transition is second  # type: ignore[attr-defined]


def test_a_module_that_the_file_registers_is_kept(write: Write) -> None:
    load_file(write(OWN_MODULE))
    known = TRANSITIONS.get("toy_gate")
    assert known is not None and known.formula == "mine"
    load_file(write(GATE))
    assert TRANSITIONS.get("toy_gate") is not known
