"""What a check works with: a subject in a precision, and comparisons of the tensors that it computes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from .allowance import Reference
from .check import Capability, CheckFailure


@dataclass(frozen=True)
class Context(ABC):
    """A subject under check: a ``Recurrence`` or a ``CheckedMixer``.

    Attributes:
        name: what reports call it.
        seed: of every random draw.
        dtype: of the inputs of the exact checks.
        capabilities: what it has; checks that need more are left out.
    """

    name: str
    seed: int
    dtype: torch.dtype
    capabilities: frozenset[Capability]

    cancelled: ClassVar[float] = 0.0  # roundings of the largest entry that terms which cancel may leave

    @abstractmethod
    def with_length(self, seq_len: int) -> Self:
        """The same subject, checked on sequences of this length."""

    @abstractmethod
    def place(self, name: str, index: Sequence[int]) -> str:
        """The index of a vector of tensor ``name`` in words: [batch 1, token 17]."""

    def expect_close(self, got: Mapping[str, Tensor], exact: Mapping[str, Tensor], low: Mapping[str, Tensor]) -> None:
        """Every tensor of ``got`` lies within the allowance around ``exact`` that the run ``low`` says."""
        largest = max((float(x.detach().abs().max()) for x in exact.values() if x.numel()), default=0.0)
        for name, x in got.items():
            excess = Reference(exact[name].detach().double(), low[name].detach()).excess(x.detach())
            if excess is not None and not excess.error <= self.cancelled * torch.finfo(x.dtype).eps * largest:
                raise CheckFailure(f"{name}{self.place(name, excess.index)}: {excess}")

    def expect_equal(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Equal bit for bit: for one call made twice, be it without gradients, or with other numbers in the future.

        Each entry is then the same arithmetic in the same order, also where later rows of a product hold other numbers:
        they reach it as exact zeros or not at all. Of other sequences, heads, positions, batch sizes, lengths or
        layouts no bits may be asked: a BLAS library takes another path for the last rows of a product, or for one that
        is larger, and adds up in another order. What is compared across those goes through ``expect_equivalent``.
        """
        for name, x in got.items():
            y = expected[name]
            if x.shape != y.shape:
                raise CheckFailure(f"{name}: expected shape {list(y.shape)}, got {list(x.shape)}")
            if not torch.equal(x, y):
                gap = f"largest difference {(x.double() - y.double()).abs().max().item():.3g}"
                raise CheckFailure(f"{name}{self.place(name, first(x != y))}: expected equal bit for bit, {gap}")

    def expect_finite(self, values: Mapping[str, Tensor]) -> None:
        for name, x in values.items():
            bad = ~x.isfinite()
            if bad.any():
                raise CheckFailure(
                    f"{name}{self.place(name, first(bad))}: expected finite values, got {x[bad][0].item()}"
                )


def first(mask: Tensor) -> tuple[int, ...]:
    """Index of the first vector along the last axis that has an entry of ``mask``."""
    return tuple(mask.nonzero()[0].tolist()[: max(mask.ndim - 1, 1)])


def gradients(outputs: Iterable[Tensor], leaves: Mapping[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    """The gradient of every leaf, as "d NAME", for a fixed random loss on ``outputs``."""
    generator = torch.Generator().manual_seed(seed)
    loss = torch.stack([(x * _weights(x, generator)).sum() for x in outputs]).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}


def expect_single_gradient(trained: str, leaves: Mapping[str, Tensor], run: Callable[[], Iterable[Tensor]]) -> None:
    """Where leaf ``trained`` alone requires a gradient, it alone gets one."""
    for name, x in leaves.items():
        x.requires_grad_(name == trained).grad = None
    loss = torch.stack([x.sum() for x in run()]).sum()
    if not loss.requires_grad:
        raise CheckFailure(f"{trained}: expected a gradient, but no result depends on it")
    loss.backward()
    with_gradient = [name for name, x in leaves.items() if x.grad is not None]
    if with_gradient != [trained]:
        got = ", ".join(with_gradient) or "nothing"
        raise CheckFailure(f"expected a gradient for {trained} alone, got one for {got}")


def _weights(x: Tensor, generator: torch.Generator) -> Tensor:
    """Upstream gradients for ``x``: multiples of 1/8 up to 2, which every dtype holds exactly."""
    return (torch.randint(-16, 17, x.shape, generator=generator) / 8).to(x)
