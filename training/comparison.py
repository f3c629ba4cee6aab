"""Two models on the same data: a recipe and its rival, trained one after the other with one training section."""

from dataclasses import dataclass
from pathlib import Path

import torch

from statemix.recipes import Recipe, load

from .loop import execute
from .model_folder import MODEL_FILE
from .result import RunResult
from .run_plan import RunPlan, plan_run


@dataclass(frozen=True)
class Comparison:
    """The results of a recipe and of its rival, and whether a lower score is better."""

    own: RunResult
    rival: RunResult
    lower_is_better: bool

    def table(self) -> str:
        """One row a model, the better score marked; then where the rival is."""
        best = (min if self.lower_is_better else max)(self.own.heldout_value, self.rival.heldout_value)
        rows = [("model", self.own.score_name, "parameters", "tokens/s", "seconds")]
        for result in (self.own, self.rival):
            score = f"{result.heldout_value:.4f}" + (" *" if result.heldout_value == best else "  ")
            speed = f"{result.tokens_per_second:,.0f}"
            rows.append((result.name, score, f"{result.num_parameters:,}", speed, f"{result.seconds:.0f}"))
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]))]) for row in rows]
        better = "lower" if self.lower_is_better else "higher"
        note = f"* better ({better}); {self.own.steps} steps on the same data each"
        where = f"{self.rival.name} is written to {self.rival.folder}"
        return "\n".join([*lines, note, where])


def compare(
    recipe: Recipe,
    rival: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> Comparison:
    """Train ``recipe`` in ``out`` and the model of ``rival`` in ``out/versus-NAME``.

    The rival's own training section is set aside for the recipe's: same data, steps, schedule and seed. With ``resume``
    a finished run is only scored again, and a rival that had not begun begins.

    Raises:
        ValueError, NonFiniteError, Interrupted: as ``train``; both runs are checked before the first is begun.
    """
    plans = _plan_both(recipe, rival, Path(out), resume=resume, device=device)
    own, other = (execute(plan, progress=progress) for plan in plans)
    return Comparison(own, other, plans[0].task.metric.lower_is_better)


def _plan_both(
    recipe: Recipe, rival: Recipe, out: Path, *, resume: bool, device: str | torch.device | None
) -> tuple[RunPlan, RunPlan]:
    equal_terms = load({**rival.model_dump(), "training": recipe.training.model_dump()})
    folder = out / f"versus-{rival.name}"
    has_begun = (folder / MODEL_FILE).is_file()
    return (
        plan_run(recipe, out, resume=resume, stop_after=None, device=device),
        plan_run(equal_terms, folder, resume=resume and has_begun, stop_after=None, device=device),
    )
