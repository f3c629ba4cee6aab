"""Checkpoints of a run: model.safetensors with its step, and state/step-N.pt with all the rest of that step.

The state (optimizer, random generators, data fingerprint) is written first under its step; then the weights, whose
metadata names the step, replace the old ones in one rename. That rename is the commit: before it the folder holds the
old checkpoint whole, after it the new one. The old state is deleted last.
"""

from pathlib import Path
from typing import Any

import torch

from statemix.blocks import CausalLM
from statemix.recipes import Recipe

from .model_folder import MODEL_FILE, read_origin, read_weights, write_weights
from .run_files import replaced

STATE_FOLDER = "state"


def save_checkpoint(
    folder: Path, *, recipe: Recipe, model: CausalLM, optimizer: torch.optim.Optimizer, step: int, data: str
) -> None:
    """Write the checkpoint of ``step`` and drop the one before it; ``data`` is the fingerprint of the task."""
    states = folder / STATE_FOLDER
    states.mkdir(exist_ok=True)
    current = states / f"step-{step}.pt"
    device = next(model.parameters()).device
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    content = {
        "format": 1,
        "step": step,
        "optimizer": optimizer.state_dict(),
        "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
        "data": data,
    }
    with replaced(current) as temporary:
        torch.save(content, temporary)
    write_weights(model, folder / MODEL_FILE, recipe=recipe, step=step)
    for other in states.glob("step-*.pt"):
        if other != current:
            other.unlink()


def read_state(folder: Path) -> dict[str, Any]:
    """The state that belongs to the weights of a run folder, tensors on the CPU.

    Raises:
        ValueError: the folder holds no checkpoint of training.
    """
    weights = folder / MODEL_FILE
    if not weights.is_file():
        raise ValueError(
            f"out: expected a run folder with a checkpoint, got no {MODEL_FILE} in {str(folder)!r}; "
            "leave out --resume to start a run, or name the folder of one"
        )
    step = read_origin(weights).get("step")
    state = folder / STATE_FOLDER / f"step-{step}.pt"
    if step is None or not state.is_file():
        raise ValueError(
            f"out: expected a checkpoint of training in {str(folder)!r}, got weights without the optimizer state of "
            f"their step in {STATE_FOLDER}/; they can be loaded with load_model, but training cannot go on from them"
        )
    try:
        content = torch.load(state, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever a damaged file leads to
        raise ValueError(f"out: expected a state of training in {str(state)!r}, got a damaged file: {error}") from error
    if not isinstance(content, dict) or not {"step", "optimizer", "rng", "data"} <= content.keys():
        raise ValueError(f"out: expected a state of training in {str(state)!r}, got a file with other content")
    return content


def restore(
    state: dict[str, Any], folder: Path, *, recipe: Recipe, model: CausalLM, optimizer: torch.optim.Optimizer
) -> None:
    """Put a checkpoint back: weights, optimizer, random generators."""
    read_weights(model, folder / MODEL_FILE, recipe=recipe)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"]["cpu"])
    device = next(model.parameters()).device
    if device.type == "cuda" and state["rng"]["cuda"] is not None:
        torch.cuda.set_rng_state(state["rng"]["cuda"], device)
