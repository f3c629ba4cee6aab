"""Everything that can refuse a run, checked before its folder is made."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from statemix.recipes import Recipe, load
from statemix.tasks import Task

from .model_folder import RECIPE_FILE, first_difference
from .run_files import plugin_names, refuse_other_plugins
from .run_state import read_state

# What may change on resume: none of these touches the steps already taken.
FREE_KEYS = ("training.checkpoint_every", "training.log_every", "training.eval_batches")


@dataclass(frozen=True)
class RunPlan:
    """A run that may start.

    Attributes:
        data: fingerprint of the task.
        stop_at: the step after which to save and end.
        state: the checkpoint to go on from, None for a new run.
    """

    recipe: Recipe
    folder: Path
    task: Task
    data: str
    device: torch.device
    stop_at: int
    state: dict[str, Any] | None

    @property
    def start(self) -> int:
        """Steps already taken."""
        return 0 if self.state is None else int(self.state["step"])


def plan_run(
    recipe: Recipe, out: str | Path, *, resume: bool, stop_after: int | None, device: str | torch.device | None
) -> RunPlan:
    """Check folder, recipe, data and device, reading only.

    Raises:
        ValueError: names what is wrong and what to do.
    """
    folder = Path(out)
    state = None
    if resume:
        state = read_state(folder)
        refuse_other_plugins(folder, recipe)
        _refuse_another_recipe(load(folder / RECIPE_FILE), recipe, folder)
    else:
        _refuse_existing(folder)
    task = recipe.build_task()
    data = task.fingerprint()
    if state is not None and state["data"] != data:
        raise ValueError(task.other_data)
    plan = RunPlan(recipe, folder, task, data, _choose_device(device), recipe.training.steps, state)
    return plan if stop_after is None else _stopped(plan, stop_after)


def _refuse_existing(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(
            f"out: expected a new or empty folder, got {str(folder)!r}, which exists; "
            "go on with that run by --resume, name another folder, or delete it"
        )


def _refuse_another_recipe(old: Recipe, new: Recipe, folder: Path) -> None:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    before["plugins"], after["plugins"] = plugin_names(old), plugin_names(new)
    for key in FREE_KEYS:
        section, name = key.split(".")
        before[section].pop(name)
        after[section].pop(name)
    if new.training.steps > old.training.steps:
        # A longer schedule is another schedule; a warm-up given as a share of the steps comes with it.
        for name in ("steps", "warmup_steps"):
            after["training"][name] = before["training"][name]
    difference = first_difference(before, after)
    if difference is not None:
        raise ValueError(
            f"{difference.path}: expected {difference.old!r} as in {folder / RECIPE_FILE}, got {difference.new!r}; "
            f"only {', '.join(FREE_KEYS)} may change, and training.steps may be raised"
        )


def _choose_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected a name such as cpu, cuda or cuda:1, got {device!r}") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, where training is tested, got {device!r}")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected one that this machine has, got {device!r} without a usable GPU; use cpu")
    return chosen


def _stopped(plan: RunPlan, stop_after: int) -> RunPlan:
    if not plan.start < stop_after <= plan.stop_at:
        raise ValueError(
            f"stop_after: expected a step from {plan.start + 1} to {plan.stop_at} (training.steps), got {stop_after}"
        )
    return replace(plan, stop_at=stop_after)
