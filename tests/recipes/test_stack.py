"""Stack expressions: what they expand to, and that nothing wrong is dropped or guessed."""

import pytest

from statemix.recipes.errors import Inconsistent
from statemix.recipes.stack import MAX_LAYERS, expand

NAMES = ("delta", "window", "a-b_2")


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ("delta", "delta"),
        ("delta window", "delta window"),
        ("(delta window)*2", "delta window delta window"),
        ("delta*3 window", "delta delta delta window"),
        ("((delta)*3 window)*2", "delta delta delta window delta delta delta window"),
        ("((delta*2 window)*2 a-b_2)", "delta delta window delta delta window a-b_2"),
        ("  delta * 2\n window ", "delta delta window"),
        (["delta*2", "(window delta)*1"], "delta delta window delta"),
        # a list that looks periodic up to its fifth entry is not
        (
            ["delta", "delta", "window", "delta", "window", "window", "delta"],
            "delta delta window delta window window delta",
        ),
    ],
)
def test_a_stack_expands_to_one_name_a_layer(stack: str | list[str], expected: str) -> None:
    assert expand(stack, NAMES) == tuple(expected.split())


@pytest.mark.parametrize(
    ("stack", "position", "message"),
    [
        ("M?*", 1, "unknown layer M at position 1"),
        ("delta?*", 6, "got '?' at position 6"),
        ("delta, window", 6, "got ',' at position 6"),
        (
            "(delta windw)*12",
            8,
            "unknown layer windw at position 8; expected one of delta, window, a-b_2; did you mean window?",
        ),
        ("", 1, "got an empty stack"),
        ("   ", 1, "got an empty stack"),
        ("delta ()", 7, "the group at position 7 is empty"),
        ("(delta (window)", 1, "'(' at position 1 is never closed"),
        ("delta) window", 6, "')' closes nothing at position 6"),
        ("delta*0", 7, "expected a count of 1 or more after '*' at position 6, got '0'"),
        ("delta*", 6, "got nothing"),
        ("delta*x", 7, "got 'x'"),
        ("delta*-1", 7, "got '-'"),
        ("delta*2*3", 8, "got '*' at position 8"),
        ("2*delta", 1, "got '2' at position 1"),
        ("*2", 1, "got '*' at position 1"),
        (f"delta*{MAX_LAYERS + 1}", 7, "lower the count"),
        ("(((delta*9999)*9999)*9999)*9999", 16, "lower the count"),
    ],
)
def test_a_wrong_stack_is_refused_with_its_position(stack: str, position: int, message: str) -> None:
    with pytest.raises(Inconsistent) as caught:
        expand(stack, NAMES)
    (fault,) = caught.value.faults
    assert fault.path == ()
    first, *shown = fault.message.split("\n")
    assert message in first
    if stack.strip():
        line, caret = shown
        assert (line.strip(), caret.index("^") - len(line) + len(line.lstrip())) == (stack, position - 1)


def test_a_caret_points_into_the_right_line_of_a_long_stack() -> None:
    with pytest.raises(Inconsistent) as caught:
        expand("delta*2\nwindw", NAMES)
    assert caught.value.faults[0].message.endswith("\n    windw\n    ^")


def test_a_wrong_item_of_a_list_is_named_by_its_index() -> None:
    with pytest.raises(Inconsistent) as caught:
        expand(["delta", "windw"], NAMES)
    assert caught.value.faults[0].path == (1,)
    with pytest.raises(Inconsistent, match="empty list"):
        expand([], NAMES)
