"""What is checked of a transition: the recurrence that a scan makes of it, on random problems, in every form."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from statemix.harness.context import Context, gradients
from statemix.harness.problem import Make, Problem, Sizes
from statemix.transitions import ScanResult

from .definition import definition

CHUNK_SIZE = 16  # the smallest, so that short sequences have several chunks

Run = Callable[[Problem], ScanResult]


@dataclass(frozen=True)
class Recurrence(Context):
    """A transition under the scan being checked.

    Attributes:
        make: draws a float64 problem.
        sizes: of the problems.
        scan: the implementation, with the signature of ``statemix.scan``.
        forms: those that the scan has for this transition.
    """

    make: Make
    sizes: Sizes
    scan: Callable[..., ScanResult]
    forms: tuple[str, ...]

    def with_length(self, seq_len: int) -> Self:
        return replace(self, sizes=replace(self.sizes, seq_len=seq_len))

    def problem(self, *, has_state: bool = True, **sizes: int) -> Problem:
        """A problem rounded to ``dtype``, with a random initial state; ``sizes`` replace those of the case."""
        generator = torch.Generator().manual_seed(self.seed)
        problem = self.make(replace(self.sizes, **sizes), generator)
        return (problem.with_state(generator) if has_state else problem).to(self.dtype)

    def run(self, form: str, **options: Any) -> Run:
        """The scan in one form, in chunks of 16."""
        options = {"chunk_size": CHUNK_SIZE, **options}
        return lambda problem: self.scan(**problem.arguments(), form=form, **options)

    def runs(self, **options: Any) -> list[Run]:
        """The scan in every form."""
        return [self.run(form, **options) for form in self.forms]

    def expect_definition(self, problem: Problem) -> None:
        """Every form gives the results and gradients of the definition."""
        self.expect_equivalent(self.runs(), definition, problem)

    def expect_equivalent(self, runs: Sequence[Run], reference: Run, problem: Problem) -> None:
        """``runs`` give the results and gradients of ``reference`` in float64 on the same, already rounded inputs."""
        exact, rounded = differentiate(reference, problem.to(torch.float64)), problem.to(torch.float32)
        low = None if problem.q.dtype == torch.float64 else differentiate(reference, rounded)
        for run in runs:
            self.expect_close(differentiate(run, problem), exact, low or differentiate(run, rounded))

    def place(self, name: str, index: Sequence[int]) -> str:
        """With the chunk of a token: [batch 1, token 17 (chunk 1), head 2]."""
        if not index:
            return ""
        axes = ["batch", "head"] if "state" in name else ["batch", "token", "head"]
        if name.startswith("d ") and len(index) > len(axes) == 3:
            axes[2:] = ["write", "head", "block"]
        words = {axis: f"{axis} {i}" for axis, i in zip(axes, index, strict=False)}
        if "token" in words:
            words["token"] += f" (chunk {index[1] // CHUNK_SIZE})"
        return f"[{', '.join(words.values())}]"


def around(
    run: Run,
    *,
    before: Callable[[Problem], Problem] = lambda problem: problem,
    after: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda output, state: (output, state),
) -> Run:
    """``run`` on a changed problem, with changed results."""
    return lambda problem: ScanResult(*after(*run(before(problem))))


def differentiate(run: Run, problem: Problem) -> dict[str, Tensor]:
    """Output, final state and the gradient of every tensor, for a fixed random loss on output and final state."""
    leaves = problem.leaves()
    result = run(leaves)
    values = {"output": result.output.detach(), "final_state": result.final_state.detach()}
    return values | gradients(result, leaves.tensors(), seed=1)
