"""What a check works with: a subject, its random problems, and runs of them with every gradient."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from statemix.transitions import ScanResult

from .allowance import Excess, Reference
from .definition import definition
from .problem import Problem, Sizes

CHUNK_SIZE = 16  # the smallest, so that short sequences have several chunks

Make = Callable[[Sizes, torch.Generator], Problem]
Run = Callable[[Problem], ScanResult]


class CheckFailure(AssertionError):
    """A check that did not hold; the message says where."""


@dataclass(frozen=True)
class Subject:
    """What is checked: a name and a sampler of float64 problems in range."""

    name: str
    make: Make


@dataclass(frozen=True)
class Context:
    """A subject under the scan being checked.

    Attributes:
        subject: what is checked.
        scan: the implementation, with the signature of ``statemix.scan``.
        seed: of every random draw.
        has_chunk_form: the transition lowers, so there are several forms to compare.
        dtype: of the inputs; float32 for an implementation that takes no float64.
        only_forms: the forms that the implementation has; None for all.
    """

    subject: Subject
    scan: Callable[..., ScanResult]
    seed: int = 0
    has_chunk_form: bool = False
    dtype: torch.dtype = torch.float64
    only_forms: tuple[str, ...] | None = None

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def problem(self, sizes: Sizes, *, has_state: bool = True) -> Problem:
        """A problem rounded to ``dtype``, by default with a random initial state."""
        generator = self.generator()
        problem = self.subject.make(sizes, generator)
        if has_state:
            shape = (sizes.batch, sizes.num_value_heads, sizes.value_dim, sizes.key_dim)
            problem = replace(problem, initial_state=torch.randn(shape, generator=generator, dtype=torch.float64))
        return problem.to(self.dtype)

    def forms(self) -> tuple[str, ...]:
        if self.only_forms is not None:
            return self.only_forms
        return ("recurrent", "chunk", "parallel") if self.has_chunk_form else ("recurrent",)

    def run(self, form: str, **options: Any) -> Run:
        """The scan in one form, in chunks of 16."""
        options = {"chunk_size": CHUNK_SIZE, **options}
        return lambda problem: self.scan(**problem.arguments(), form=form, **options)


def differentiate(run: Run, problem: Problem, *, seed: int = 1) -> dict[str, Tensor]:
    """Output, final state and the gradient of every tensor, for a fixed random loss on output and final state."""
    leaves = problem.leaves()
    result = run(leaves)
    generator = torch.Generator().manual_seed(seed)
    loss = torch.stack([(x * random_weights(x, generator)).sum() for x in result]).sum()
    names, tensors = zip(*leaves.tensors().items(), strict=True)
    grads = torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)
    named = {f"d {name}": grad for name, grad in zip(names, grads, strict=True)}
    return {"output": result.output.detach(), "final_state": result.final_state.detach()} | named


def random_weights(x: Tensor, generator: torch.Generator) -> Tensor:
    """Upstream gradients for ``x``: multiples of 1/8 up to 2, which every dtype holds exactly."""
    return (torch.randint(-16, 17, x.shape, generator=generator) / 8).to(x.dtype)


def expect_definition(run: Run, problem: Problem) -> None:
    """``run`` gives the results and gradients of the definition."""
    expect_equivalent(run, definition, problem)


def expect_equivalent(run: Run, reference: Run, problem: Problem) -> None:
    """``run`` gives the results and gradients of ``reference`` in float64 on the same, already rounded inputs."""
    exact = differentiate(reference, problem.to(torch.float64))
    lower = run if problem.q.dtype == torch.float64 else reference
    expect(differentiate(run, problem), exact, differentiate(lower, problem.to(torch.float32)))


def expect(got: dict[str, Tensor], exact: dict[str, Tensor], low: dict[str, Tensor]) -> None:
    """Every tensor of ``got`` lies within its allowance."""
    for name, x in got.items():
        excess = Reference(exact[name], low[name]).excess(x)
        if excess is not None:
            raise CheckFailure(f"{name}{locate(name, excess)}: {describe(excess)}")


def expect_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Equal bit for bit: for one call made twice, be it without gradients, or with other numbers in the future.

    Each entry is then the same arithmetic in the same order, also where later rows of a product hold other numbers:
    they reach it as exact zeros or not at all. Of other rows, heads, positions, batch sizes, lengths or layouts no bits
    may be asked: a BLAS library takes another path for the last rows of a product, or for one that is larger, and adds
    up in another order. What is compared across those goes through ``expect_equivalent``.
    """
    for name, x in got.items():
        y = want[name]
        if x.shape != y.shape or not torch.equal(x, y):
            differs = "" if x.shape != y.shape else locate(name, Excess(_first(x != y), 0.0, 0.0, ""))
            gap = "shapes differ" if x.shape != y.shape else f"largest difference {(x - y).abs().max().item():.3g}"
            raise CheckFailure(f"{name}{differs}: expected equal bit for bit, {gap}")


def locate(name: str, excess: Excess) -> str:
    """The row in words: [batch 1, token 17 (chunk 1), head 2]."""
    if not excess.row:
        return ""
    axes = ["batch", "head"] if "state" in name else ["batch", "token", "head"]
    if len(excess.row) > len(axes):
        axes[-1:] = ["write", "head"] if len(excess.row) == len(axes) + 1 else ["write", "head", "block"]
    words = []
    for axis, i in zip(axes, excess.row, strict=False):
        words.append(f"{axis} {i} (chunk {i // CHUNK_SIZE})" if axis == "token" else f"{axis} {i}")
    return f"[{', '.join(words)}]"


def describe(excess: Excess) -> str:
    return excess.note or f"error {excess.error:.3g}, allowed {excess.allowed:.3g}"


def _first(differs: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in differs.nonzero()[0][: max(differs.ndim - 1, 1)])
