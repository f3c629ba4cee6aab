"""Training from a recipe to a run folder.

    recipe.yaml  model.safetensors  metrics.jsonl  state/  curves.png  result.json  events.out.tfevents.*

A run is a function of its recipe and its data: stopped after any step and resumed in another process it ends with the
same bits, as long as ``training.steps`` stays the same (raising it is allowed, and changes the cosine from there on).
"""

import dataclasses
import math
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from statemix.recipes import Recipe

from .metrics import MetricLog, draw_curves
from .model_folder import RECIPE_FILE
from .nonfinite import NonFiniteError
from .objective import evaluate
from .progress import Clock, show_progress, tokens_per_step
from .result import RunResult
from .run_files import carried_yaml, copy_plugins, write_text
from .run_plan import RunPlan, plan_run
from .trainer import Trainer


class Interrupted(Exception):
    """Training was stopped by Ctrl-C and a checkpoint is saved; a command line ends with ``exit_code``.

    Attributes:
        step: the step of the checkpoint.
        folder: the run folder.
        command: the command that goes on.
    """

    exit_code = 130  # 128 + SIGINT, as shells report it

    def __init__(self, step: int, folder: Path) -> None:
        self.step = step
        self.folder = folder
        trust = ["--trust-plugins"] * any(folder.glob("*.py"))  # the run's own copies, which have run
        recipe = str(folder / "recipe.yaml")
        self.command = shlex.join(["statemix", "train", recipe, "--out", str(folder), "--resume", *trust])
        super().__init__(f"stopped by Ctrl-C; step {step} is saved in {folder}; to go on: {self.command}")


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> RunResult:
    """Train the model of ``recipe``, save it in the run folder ``out``, score it on held-out data.

    Args:
        out: a new or empty folder; with ``resume`` the folder of a run with the same recipe.
        resume: go on from the checkpoint. ``training.checkpoint_every``, ``log_every`` and ``eval_batches`` may differ
            from the run's recipe and ``training.steps`` may be higher.
        stop_after: save and end after this step, as Ctrl-C would; the schedule stays that of ``training.steps``.
        device: None takes a GPU when there is one. On a GPU products run in bfloat16.
        progress: show progress on standard error.

    Raises:
        ValueError: bad folder, recipe, data or device; nothing has been written.
        NonFiniteError: the loss, a gradient or a parameter became nan or inf; the last checkpoint stays.
        Interrupted: Ctrl-C; the step is finished and saved.
    """
    return execute(plan_run(recipe, out, resume=resume, stop_after=stop_after, device=device), progress=progress)


def execute(plan: RunPlan, *, progress: bool) -> RunResult:
    """Carry out a plan; see ``train``."""
    trainer = Trainer(plan)
    plan.folder.mkdir(parents=True, exist_ok=True)
    copy_plugins(plan.recipe, plan.folder)
    write_text(plan.folder / RECIPE_FILE, carried_yaml(plan.recipe))
    # A checkpoint of step 0, so that from here on the folder can always be resumed.
    trainer.save()
    try:
        with MetricLog(plan.folder, keep_until=plan.start) as log:
            seconds, loss = _take_steps(trainer, log, progress=progress)
            result = _report(trainer, seconds=seconds, loss=loss)
            log.add_event(f"heldout/{result.heldout_metric}", result.heldout_value, step=trainer.step)
    except NonFiniteError as error:
        raise NonFiniteError(
            f"{error}; the last good checkpoint, step {trainer.saved_step}, stays in {plan.folder}; "
            "start again with a lower training.lr or a longer warm-up"
        ) from error
    except KeyboardInterrupt:
        raise Interrupted(trainer.saved_step or 0, plan.folder) from None
    return result


def _take_steps(trainer: Trainer, log: MetricLog, *, progress: bool) -> tuple[float, float]:
    """Step to the end of the plan, logging and saving on the way; returns the seconds of the run and its last loss.

    Raises:
        Interrupted: Ctrl-C came; everything is saved.
    """
    plan, training = trainer.plan, trainer.recipe.training
    clock = Clock(trainer, before=log.last["seconds"] if log.last else 0.0)
    loss = log.last["loss"] if log.last else math.nan
    metric = plan.task.metric
    shown = show_progress(plan.recipe.name, shown=progress, start=plan.start, steps=training.steps, metric=metric)
    with deferred_interrupt() as interrupt, shown as show:
        while trainer.step < plan.stop_at and not interrupt.requested:
            record = trainer.advance()
            loss = record.loss
            show(trainer.step, loss=loss, tokens_per_second=clock.tokens_per_second())
            if trainer.step % training.log_every == 0 or trainer.step == training.steps:
                log.write(trainer.step, {**dataclasses.asdict(record), **clock.lap()})
            if trainer.step % training.checkpoint_every == 0 and trainer.step < plan.stop_at:
                _save(trainer)
        _save(trainer)
    if interrupt.requested:
        raise Interrupted(trainer.step, plan.folder)
    return clock.seconds(), loss


def _save(trainer: Trainer) -> None:
    trainer.save()
    draw_curves(trainer.plan.folder, title=trainer.recipe.name, metric=trainer.plan.task.metric)


def _report(trainer: Trainer, *, seconds: float, loss: float) -> RunResult:
    """Score the trained model, draw a sample and write both down."""
    plan, training = trainer.plan, trainer.recipe.training
    heldout = plan.task.heldout_batches(training.eval_batches, training.batch_size)
    evaluation = evaluate(trainer.model, heldout, device=plan.device)
    trainer.model.eval()
    result = RunResult(
        name=plan.recipe.name,
        folder=plan.folder,
        steps=trainer.step,
        num_parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        train_loss=loss,
        heldout_loss=evaluation.loss,
        heldout_metric=plan.task.metric.name,
        heldout_value=evaluation.score(plan.task.metric),
        tokens_per_second=trainer.step * tokens_per_step(training) / seconds if seconds else 0.0,
        seconds=seconds,
        sample=plan.task.sample(trainer.model),
    )
    result.write()
    return result


class InterruptFlag:
    """Whether Ctrl-C came."""

    requested = False


@contextmanager
def deferred_interrupt() -> Iterator[InterruptFlag]:
    """Turn the first Ctrl-C into a flag to be looked at between steps; a second one raises KeyboardInterrupt as usual.

    Signals reach the main thread only, so in another thread the flag is never set.
    """
    flag = InterruptFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def ask_to_stop(signum: int, frame: FrameType | None) -> None:
        flag.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, ask_to_stop)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)
