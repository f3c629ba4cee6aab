"""A small recipe to break, and a way to load a text from a file."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from statemix.recipes import Recipe, RecipeError, load

SMALL = """\
name: small
model: {vocab_size: 256, hidden_size: 16}
layers:
  delta:
    mixer: {type: state, num_heads: 2, key_dim: 8, value_dim: 8, conv_size: 4, transition: householder}
    mlp: &mlp {type: swiglu, width: 24}
  window:
    mixer: {type: attention, num_heads: 2, window: 4}
    mlp: *mlp
stack: (delta window)*2
training: {task: text, seq_len: 16, steps: 20, lr: 1e-4, warmup_steps: 2, seed: 3}
"""

Load = Callable[..., Recipe]
Refusal = Callable[..., str]


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    """Load a text written to ``small.yaml``; each ``"old -> new"`` replaces the first ``old`` of the small recipe."""

    def from_text(*changes: str, text: str = SMALL, overrides: Sequence[str] = ()) -> Recipe:
        for change in changes:
            old, new = change.split(" -> ")
            assert old in text
            text = text.replace(old, new, 1)
        file = tmp_path / "small.yaml"
        file.write_text(text, encoding="utf-8")
        return load(file, overrides)

    return from_text


@pytest.fixture
def refusal(load_text: Load, tmp_path: Path) -> Refusal:
    """The message of the RecipeError, with the folder left out of the file's name."""

    def message(*changes: str, text: str = SMALL, overrides: Sequence[str] = ()) -> str:
        with pytest.raises(RecipeError) as caught:
            load_text(*changes, text=text, overrides=overrides)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return message
