"""Progress of a run: its time and throughput, and what standard error shows.

That is a bar on a terminal, plain lines elsewhere, nothing when switched off.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from statemix.recipes import TrainingConfig
from statemix.tasks import Metric

from .trainer import Trainer

SECONDS_BETWEEN_LINES = 5.0


def tokens_per_step(training: TrainingConfig) -> int:
    """Tokens one optimizer step reads."""
    return training.batch_size * training.accumulate * training.seq_len


class Clock:
    """Seconds of a run, ``before`` of them in earlier processes, and tokens a second since the last lap."""

    def __init__(self, trainer: Trainer, *, before: float) -> None:
        self._trainer = trainer
        self._began = time.perf_counter() - before
        self._lap_began = time.perf_counter()
        self._lap_step = trainer.step

    def seconds(self) -> float:
        """Seconds of the run so far."""
        return time.perf_counter() - self._began

    def tokens_per_second(self) -> float:
        """Throughput since the last lap."""
        tokens = (self._trainer.step - self._lap_step) * tokens_per_step(self._trainer.recipe.training)
        return tokens / (time.perf_counter() - self._lap_began)

    def lap(self) -> dict[str, float]:
        """``tokens_per_second`` and ``seconds`` for the log; the next lap begins here."""
        figures = {"tokens_per_second": self.tokens_per_second(), "seconds": self.seconds()}
        self._lap_began, self._lap_step = time.perf_counter(), self._trainer.step
        return figures


class Show(Protocol):
    """Shows the state of a run after ``step``; ``loss`` in nats."""

    def __call__(self, step: int, *, loss: float, tokens_per_second: float) -> None: ...


@contextmanager
def show_progress(title: str, *, shown: bool, start: int, steps: int, metric: Metric) -> Iterator[Show]:
    """Yield what to call after every step; a metric that the loss stands for is shown beside it."""
    if not shown:
        yield _show_nothing
    elif sys.stderr.isatty():
        with _bar(title, start=start, steps=steps, metric=metric) as show:
            yield show
    else:
        yield _lines(title, start=start, steps=steps, metric=metric)


def _show_nothing(step: int, *, loss: float, tokens_per_second: float) -> None:
    pass


@contextmanager
def _bar(title: str, *, start: int, steps: int, metric: Metric) -> Iterator[Show]:
    # Imported here because a silent run needs no terminal library.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=steps, completed=start, figures="")

        def show(step: int, *, loss: float, tokens_per_second: float) -> None:
            progress.update(task, completed=step, figures=_figures(loss, tokens_per_second, metric))

        yield show


def _lines(title: str, *, start: int, steps: int, metric: Metric) -> Show:
    began = time.monotonic()
    next_line = began

    def show(step: int, *, loss: float, tokens_per_second: float) -> None:
        nonlocal next_line
        now = time.monotonic()
        if now < next_line and step < steps:
            return
        next_line = now + SECONDS_BETWEEN_LINES
        left = (now - began) / (step - start) * (steps - step)
        minutes, seconds = divmod(round(left), 60)
        figures = _figures(loss, tokens_per_second, metric)
        print(f"{title}  {step}/{steps}  {figures}  {minutes}:{seconds:02d} left", file=sys.stderr, flush=True)

    return show


def _figures(loss: float, tokens_per_second: float, metric: Metric) -> str:
    score = f"  {metric.from_loss(loss):.3f} {metric.unit}" if metric.from_loss else ""
    return f"loss {loss:.3f}{score}  {tokens_per_second:,.0f} tokens/s"
