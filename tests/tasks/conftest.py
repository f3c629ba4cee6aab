"""A recipe for the tests of tasks, which build no model."""

from collections.abc import Callable

import pytest

from statemix.recipes import Recipe, load


@pytest.fixture(scope="session")
def make_recipe() -> Callable[..., Recipe]:
    """``make_recipe("training.seq_len=7", ...)``: a shipped recipe with overrides."""
    return lambda *overrides: load("linear-attention", overrides)
