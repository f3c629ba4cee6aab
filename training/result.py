"""What a finished run reports, also as result.json in its folder."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from .run_files import write_text

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class RunResult:
    """The outcome of ``train``.

    Attributes:
        name: the recipe's name.
        folder: the run folder.
        steps: steps taken in all, resumed ones included.
        num_parameters: a tied weight counts once.
        train_loss: loss of the last step, in nats.
        heldout_loss: mean loss on held-out data, in nats.
        heldout_metric: name of the task's metric: ``bits_per_byte``, ``accuracy`` (0 to 1), ...
        heldout_value: the value of that metric on held-out data.
        tokens_per_second: over the training steps of this and earlier processes.
        seconds: time those steps took.
        sample: generated text behind its prompt, None for tasks without text.
    """

    name: str
    folder: Path
    steps: int
    num_parameters: int
    train_loss: float
    heldout_loss: float
    heldout_metric: str
    heldout_value: float
    tokens_per_second: float
    seconds: float
    sample: str | None

    @property
    def score_name(self) -> str:
        """The metric in words, ``held-out bits per byte``."""
        return f"held-out {self.heldout_metric.replace('_', ' ')}"

    def summary(self) -> str:
        """The figures in a few lines, with the sample last."""
        lines = [
            f"{self.name}: {self.score_name} {self.heldout_value:.4f} after {self.steps} steps "
            f"({self.num_parameters:,} parameters, {self.tokens_per_second:,.0f} tokens/s, {self.seconds:.0f} s)",
            f"written to {self.folder}",
        ]
        if self.sample is not None:
            lines.append(f"sample, the start of the held-out text continued:\n{self.sample}")
        return "\n".join(lines)

    def write(self) -> None:
        """Write ``result.json`` into the run folder."""
        values = {"format": 1, **dataclasses.asdict(self), "folder": str(self.folder)}
        write_text(self.folder / RESULT_FILE, json.dumps(values, indent=2) + "\n")
