"""The recurrences as subjects of the harness: float64 operands, everywhere in range.

Rates reach 2 and decays fall below e^-4; queries have any length.
"""

from functools import partial

import torch
from torch import Tensor

from .problem import Problem, Sizes, Subject
from .recurrences import RECURRENCES, NamedRecurrence, Source


class InRange(Source):
    """Random tensors of a problem, float64."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def value(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def query(self, *shape: int, blocks: int) -> Tensor:
        return self.value(*shape)

    def unit_key(self, *shape: int, blocks: int) -> Tensor:
        x = self.value(*shape).unflatten(-1, (blocks, -1))
        return (x / x.norm(dim=-1, keepdim=True)).flatten(-2)

    def rate(self, *shape: int) -> Tensor:
        return 2 * self.uniform(*shape)

    def log_decay(self, *shape: int) -> Tensor:
        return -5 * self.uniform(*shape) ** 3

    def fixed_decay(self, num_heads: int) -> Tensor:
        return -self.uniform(num_heads)


def _problem(row: NamedRecurrence, sizes: Sizes, generator: torch.Generator) -> Problem:
    x = row.draw(sizes, InRange(generator))
    return Problem(x.q, x.k, x.v, *row.build(x))


CATALOGUE: dict[str, Subject] = {
    row.subject: Subject(row.subject, partial(_problem, row)) for row in RECURRENCES.values() if row.subject
}
