"""Is a recurrence any good? Two small runs of it, beside DeltaNet and GLA with the same sizes and on the same data.

    mqar      recall: 8 pairs of key and value, then every key again (``tasks/mqar.py``)
    parity    state tracking: twice as many bits as in training (``tasks/parity.py``)

One layer, hidden size 64, two heads with as many key channels as there are pairs; four to five minutes on one core.
DeltaNet fails parity with beta <= 1 and solves it with beta <= 2. One seed and one or two learning rates: a hint, not a
benchmark. Recall at seeds 0 and 1 was 1.00 and 0.99 for DeltaNet, 0.92 and 0.90 with beta <= 2, 0.90 and 0.97 for GLA.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from statemix.blocks import Block, CausalLM
from statemix.recipes import TrainingConfig
from statemix.tasks import Mqar, Parity, Task

from .objective import accumulate_gradients, evaluate
from .optimizer import build_optimizer, learning_rate
from .run_files import replaced

RIVALS: dict[str, Any] = {
    "DeltaNet, beta <= 1": "deltanet",
    "DeltaNet, beta <= 2": {"type": "householder", "max_beta": 2.0},
    "GLA": "gla",
}
SOLVED = 0.995
BATCH = 128
NUM_SCORES = 10  # on the way, for the curves


@dataclass(frozen=True)
class Setting:
    """A task with the model around the transition and the training on it.

    Attributes:
        chance: accuracy of a guess.
        learning_rates: each is tried until the task is solved; the best counts.
        conv_size: recall needs a key and its value side by side, which the short convolution of every model gives;
            parity has none, so that nothing but the transition can solve it.
    """

    task: Task
    chance: float
    conv_size: int
    steps: int
    learning_rates: tuple[float, ...]

    @property
    def name(self) -> str:
        """The name of the task."""
        return str(self.task.config.type)


@dataclass(frozen=True)
class Run:
    """One model on one task, at the best of its learning rates.

    Attributes:
        curve: (step, accuracy on held-out data); nan where the loss was no longer finite, and the run stopped.
        seconds: of all learning rates.
    """

    model: str
    setting: str
    lr: float
    curve: tuple[tuple[int, float], ...]
    seconds: float

    @property
    def accuracy(self) -> float:
        """The last one, 0 to 1."""
        return self.curve[-1][1]

    def __str__(self) -> str:
        step, accuracy = self.curve[-1]
        outcome = f"the loss is not finite at step {step}" if math.isnan(accuracy) else f"accuracy {accuracy:.3f}"
        return f"{self.setting:<8}{self.model:<22}{outcome}  (step {step}, lr {self.lr:g}, {self.seconds:.0f} s)"


@dataclass(frozen=True)
class TrialReport:
    """All runs of a trial, model by model."""

    settings: tuple[Setting, ...]
    runs: tuple[Run, ...]

    def table(self) -> str:
        """A row a model with its accuracy on each task."""
        models = list(dict.fromkeys(run.model for run in self.runs))
        width = max(map(len, models))
        lines = [f"{'':<{width}}" + "".join(f"{setting.name:>10}" for setting in self.settings) + "   seconds"]
        for model in models:
            own = {run.setting: run for run in self.runs if run.model == model}
            scores = "".join(f"{own[setting.name].accuracy:>10.3f}" for setting in self.settings)
            lines.append(f"{model:<{width}}{scores}{sum(run.seconds for run in own.values()):>10.0f}")
        chances = "".join(f"{setting.chance:>10.3f}" for setting in self.settings)
        return "\n".join([*lines, f"{'chance':<{width}}{chances}"])

    def draw(self, file: Path) -> None:
        """Held-out accuracy over the steps as a PNG, a panel a task."""
        # Slow to import; the Figure class draws with Agg and needs neither pyplot's global state nor a display.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        for axis, setting in zip(figure.subplots(1, len(self.settings), squeeze=False)[0], self.settings, strict=True):
            for run in self.runs:
                if run.setting == setting.name:
                    axis.plot(*zip(*run.curve, strict=True), marker=".", label=run.model)
            axis.axhline(setting.chance, color="gray", linestyle=":", label="chance")
            axis.set(title=setting.name, xlabel="step", ylabel="held-out accuracy", ylim=(-0.03, 1.03))
            axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
        with replaced(file) as temporary:
            figure.savefig(temporary, format="png", dpi=110)


def try_transition(
    name: str,
    transition: Any,
    *,
    settings: tuple[Setting, ...] | None = None,
    rivals: Mapping[str, Any] = RIVALS,
    seed: int = 0,
    show: Callable[[str], None] = lambda line: None,
) -> TrialReport:
    """Train and score a transition and its rivals on every task.

    Args:
        name: how to call it in the report.
        transition: what a recipe may say: a name, a mapping with options, or a list of those.
        settings: the tasks; those of ``trial_settings`` if None.
        rivals: other transitions by name.
        seed: of weights and data.
        show: is called with a line after every run.
    """
    settings = trial_settings(seed) if settings is None else settings
    runs = []
    for setting in settings:
        for model, spec in {name: transition, **rivals}.items():
            runs.append(_run(model, spec, setting, seed=seed))
            show(str(runs[-1]))
    return TrialReport(settings, tuple(runs))


def trial_settings(seed: int) -> tuple[Setting, ...]:
    """MQAR and parity."""
    mqar = Mqar(Mqar.Config(num_pairs=8, random_non_queries=False), vocab_size=64, seq_len=32, seed=seed)
    parity = Parity(Parity.Config(), vocab_size=2, seq_len=40, seed=seed)
    return (
        Setting(mqar, chance=2 / mqar.vocab_size, conv_size=4, steps=800, learning_rates=(5e-3,)),
        Setting(parity, chance=0.5, conv_size=0, steps=150, learning_rates=(5e-3, 2e-2)),
    )


def _run(model: str, transition: Any, setting: Setting, *, seed: int) -> Run:
    """The best of the learning rates of a setting; later ones are left out once the task is solved."""
    began, runs = time.perf_counter(), []
    for lr in setting.learning_rates:
        curve = _learn(transition, setting, lr=lr, seed=seed)
        runs.append(Run(model, setting.name, lr, curve, time.perf_counter() - began))
        if runs[-1].accuracy >= SOLVED:
            break
    best = max(runs, key=lambda run: -1.0 if math.isnan(run.accuracy) else run.accuracy)
    return replace(best, seconds=time.perf_counter() - began)


def _learn(transition: Any, setting: Setting, *, lr: float, seed: int) -> tuple[tuple[int, float], ...]:
    """Train one model and return its curve; ends early when the task is solved or the loss is not finite."""
    steps, device = setting.steps, torch.device("cpu")
    training = TrainingConfig(
        seq_len=setting.task.seq_len, batch_size=BATCH, steps=steps, lr=lr, warmup_steps=steps // 10, weight_decay=0.0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(transition, setting)
    optimizer = build_optimizer(model, training)
    curve: list[tuple[int, float]] = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = accumulate_gradients(model, [setting.task.train_batch(step, BATCH)])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        if not bool((loss + norm).isfinite()):
            return (*curve, (step, math.nan))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.step()
        if step % math.ceil(steps / NUM_SCORES) == 0 or step == steps:
            curve.append((step, evaluate(model, setting.task.heldout_batches(2, BATCH), device=device).accuracy))
            if curve[-1][1] >= SOLVED:
                break
    return tuple(curve)


def _model(transition: Any, setting: Setting) -> CausalLM:
    mixer = {
        "type": "state",
        "num_heads": 2,
        "key_dim": 8,
        "value_dim": 8,
        "conv_size": setting.conv_size,
        "chunk_size": 16,
    }
    layer = Block.Config.model_validate({"mixer": {**mixer, "transition": transition}, "mlp": {"width": 128}})
    return CausalLM(CausalLM.Config(vocab_size=setting.task.vocab_size, hidden_size=64), [layer])
