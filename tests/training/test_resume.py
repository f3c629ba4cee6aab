"""Stopped, and gone on with in a new process: the same bits as in one go."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from statemix.recipes import Recipe
from statemix.training import train

MakeRecipe = Callable[..., Recipe]

PROGRAM = """
import sys
from statemix.recipes import load
from statemix.training import train
train(load(sys.argv[1]), sys.argv[2], resume=True, progress=False, device="cpu")
"""


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {name: leaf for key, value in tree.items() for name, leaf in flat(value, f"{path}/{key}").items()}
    if isinstance(tree, list | tuple):
        return flat(dict(enumerate(tree)), path)
    return {path: tree}


def test_twenty_steps_are_ten_and_in_a_new_process_ten_more(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    # Steps that are no multiple of log_every or checkpoint_every, micro-batches, a tied head.
    recipe = make_recipe(
        "training.steps=20",
        "training.log_every=3",
        "training.checkpoint_every=7",
        "training.accumulate=2",
        "model.tie_embeddings=true",
    )
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    train(recipe, straight, progress=False, device="cpu")
    train(recipe, stopped, stop_after=10, progress=False, device="cpu")
    new_process = [sys.executable, "-P", "-c", PROGRAM, str(stopped / "recipe.yaml"), str(stopped)]
    subprocess.run(new_process, check=True, timeout=120)

    files = [(folder / "model.safetensors").read_bytes() for folder in (straight, stopped)]
    assert files[0] == files[1]
    states = [flat(torch.load(folder / "state" / "step-20.pt")) for folder in (straight, stopped)]
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        other = states[1][name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name
    logs = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (straight, stopped)]
    exact = [[[json.loads(line)[key] for key in ("step", "loss", "lr", "grad_norm")] for line in log] for log in logs]
    assert exact[0] == exact[1]
    assert [line[0] for line in exact[0]] == [3, 6, 9, 12, 15, 18, 20]
    results = [json.loads((folder / "result.json").read_text()) for folder in (straight, stopped)]
    assert results[0]["heldout_value"] == results[1]["heldout_value"]
