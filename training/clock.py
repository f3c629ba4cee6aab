"""Time and throughput of a run."""

import time

from statemix.recipes import TrainingConfig

from .trainer import Trainer


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
