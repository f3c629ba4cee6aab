"""The transitions of the package as subjects of the harness: one row each.

A row draws a float64 problem in range. A new transition adds its row here and brings the whole list of checks.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from statemix.transitions import (
    BlockDiagonal,
    DiagonalGate,
    FixedDecay,
    Householder,
    Identity,
    Product,
    ScalarGate,
    Transition,
)

from .problem import Problem, Sizes, Subject


class Draw:
    """Random tensors of a problem, in range, float64."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        self.sizes, self.generator = sizes, generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def unit_keys(self, *count: int, blocks: int = 1) -> Tensor:
        s = self.sizes
        x = self.normal(s.batch, s.seq_len, *count, s.num_heads, blocks, s.key_dim // blocks)
        return (x / x.norm(dim=-1, keepdim=True)).flatten(-2)

    def rates(self, *count: int, tail: tuple[int, ...] = ()) -> Tensor:
        return 2 * self.uniform(self.sizes.batch, self.sizes.seq_len, *count, self.sizes.num_value_heads, *tail)

    def log_decay(self, *tail: int) -> Tensor:
        return -5 * self.uniform(self.sizes.batch, self.sizes.seq_len, self.sizes.num_value_heads, *tail) ** 3

    def problem(self, key: Tensor, transition: Transition, write: Tensor | None = None) -> Problem:
        s, count = self.sizes, key.shape[2:-2]
        q = self.normal(s.batch, s.seq_len, s.num_heads, s.key_dim)
        v = self.normal(s.batch, s.seq_len, *count, s.num_value_heads, s.value_dim)
        return Problem(q, key, v, transition, write)


def _identity(draw: Draw) -> Problem:
    return draw.problem(draw.unit_keys(), Identity())


def _identity_two_writes(draw: Draw) -> Problem:
    return draw.problem(draw.unit_keys(2), Identity(), draw.rates(2))


def _fixed_decay(draw: Draw) -> Problem:
    return draw.problem(draw.unit_keys(), FixedDecay(-draw.uniform(draw.sizes.num_value_heads)))


def _scalar_gate(draw: Draw) -> Problem:
    return draw.problem(draw.unit_keys(), ScalarGate(draw.log_decay()), draw.rates())


def _diagonal_gate(draw: Draw) -> Problem:
    return draw.problem(draw.unit_keys(), DiagonalGate(draw.log_decay(draw.sizes.key_dim)))


def _householder(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(), draw.rates()
    return draw.problem(key, Householder(key, beta), beta)


def _householder_other_direction(draw: Draw) -> Problem:
    return draw.problem(draw.unit_keys(), Householder(draw.unit_keys(), draw.rates()), draw.rates())


def _householder_count_3(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(3), draw.rates(3)
    return draw.problem(key, Householder(key, beta), beta)


def _two_erasures_one_write(draw: Draw) -> Problem:
    return draw.problem(draw.unit_keys(), Householder(draw.unit_keys(2), draw.rates(2)), draw.rates())


def _gated_householder(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(), draw.rates()
    return draw.problem(key, Product(ScalarGate(draw.log_decay()), Householder(key, beta)), beta)


def _gated_householder_count_2(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(2), draw.rates(2)
    return draw.problem(key, Product(ScalarGate(draw.log_decay()), Householder(key, beta)), beta)


def _diagonal_gated_householder(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(), draw.rates()
    return draw.problem(key, Product(DiagonalGate(draw.log_decay(draw.sizes.key_dim)), Householder(key, beta)), beta)


def _diagonal_gated_householder_count_2(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(2), draw.rates(2)
    return draw.problem(key, Product(DiagonalGate(draw.log_decay(draw.sizes.key_dim)), Householder(key, beta)), beta)


def _householder_then_gate(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(), draw.rates()
    return draw.problem(key, Product(Householder(key, beta), DiagonalGate(draw.log_decay(draw.sizes.key_dim))), beta)


def _two_directions(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(), draw.rates()
    return draw.problem(key, Product(Householder(draw.unit_keys(), draw.rates()), Householder(key, beta)), beta)


def _block_diagonal(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(blocks=2), draw.rates(tail=(2,))
    return draw.problem(key, BlockDiagonal(Householder(key, beta), 2), beta)


def _block_diagonal_gated(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(blocks=4), draw.rates()
    inner = Product(ScalarGate(draw.log_decay(4)), Householder(key, beta))
    return draw.problem(key, BlockDiagonal(inner, 4), beta)


def _block_diagonal_count_2(draw: Draw) -> Problem:
    key, beta = draw.unit_keys(2, blocks=2), draw.rates(2, tail=(2,))
    inner = Product(DiagonalGate(draw.log_decay(draw.sizes.key_dim)), Householder(key, beta))
    return draw.problem(key, BlockDiagonal(inner, 2), beta)


def _sample(row: Callable[[Draw], Problem], sizes: Sizes, generator: torch.Generator) -> Problem:
    return row(Draw(sizes, generator))


ROWS: dict[str, Callable[[Draw], Problem]] = {
    "identity": _identity,
    "identity_two_writes": _identity_two_writes,
    "fixed_decay": _fixed_decay,
    "scalar_gate": _scalar_gate,
    "diagonal_gate": _diagonal_gate,
    "householder": _householder,
    "householder_other_direction": _householder_other_direction,
    "householder_count_3": _householder_count_3,
    "two_erasures_one_write": _two_erasures_one_write,
    "gated_householder": _gated_householder,
    "gated_householder_count_2": _gated_householder_count_2,
    "diagonal_gated_householder": _diagonal_gated_householder,
    "diagonal_gated_householder_count_2": _diagonal_gated_householder_count_2,
    "householder_then_gate": _householder_then_gate,
    "two_directions": _two_directions,
    "block_diagonal": _block_diagonal,
    "block_diagonal_gated": _block_diagonal_gated,
    "block_diagonal_count_2": _block_diagonal_count_2,
}

CATALOGUE: dict[str, Subject] = {name: Subject(name, functools.partial(_sample, row)) for name, row in ROWS.items()}
