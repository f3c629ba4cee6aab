"""The first differing key path of two nested values."""

import pytest

from statemix.training.difference import Difference, first_difference


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 3}]}}, Difference("a.b.1.c", 2, 3)),
        ({"a": 1}, {"a": 1, "b": 2}, Difference("b", None, 2)),
        ({"a": 1, "b": 2}, {"a": 1}, Difference("b", 2, None)),
        ({"a": [1]}, {"a": [1, 2]}, Difference("a", [1], [1, 2])),
        ({"a": [1]}, {"a": {"b": 1}}, Difference("a", [1], {"b": 1})),
        ({"b": 1, "a": 1}, {"a": 2, "b": 2}, Difference("b", 1, 2)),
    ],
)
def test_the_first_difference_is_named(old: object, new: object, expected: Difference | None) -> None:
    assert first_difference(old, new) == expected
