"""A tiny recipe and a tiny text for the tests of training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from statemix.recipes import Recipe, load

MakeRecipe = Callable[..., Recipe]

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"vocab_size": 256, "hidden_size": 16},
    "layers": {
        "delta": {
            "mixer": {
                "type": "state",
                "num_heads": 2,
                "key_dim": 8,
                "value_dim": 8,
                "conv_size": 4,
                "transition": "gated_deltanet",
            },
            "mlp": {"type": "swiglu", "width": 24},
        },
        "window": {
            "mixer": {"type": "attention", "num_heads": 2, "window": 7},
            "mlp": {"type": "swiglu", "width": 24},
        },
    },
    "stack": ["delta", "window"],
    "training": {
        "task": "text",
        "seq_len": 33,
        "batch_size": 2,
        "steps": 6,
        "lr": 0.003,
        "warmup_steps": 2,
        "checkpoint_every": 4,
        "log_every": 1,
        "eval_batches": 2,
        "seed": 3,
    },
}


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of 240 bytes takes longer than all else in a tiny run."""
    monkeypatch.setattr("statemix.tasks.token_stream.NEW_TOKENS", 16)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty small files of different text; copy it to change it."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"part{number:02d}.txt").write_text(f"file {number} says {number * number} and more. " * 9)
    return folder


@pytest.fixture(scope="session")
def make_recipe(text_folder: Path) -> MakeRecipe:
    """``make_recipe("training.steps=4", ...)``: the tiny recipe on the tiny text, with overrides."""

    def make(*overrides: str) -> Recipe:
        on_text = not any(override.startswith("training.task") for override in overrides)
        folder = [f"training.task={{type: text, folder: '{text_folder}'}}"] if on_text else []
        return load(TINY, overrides=[*folder, *overrides])

    return make
