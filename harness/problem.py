"""Inputs of a check: one random problem, its tensors by name, and how to change them all at once.

Shapes: B batch, T time, n writes a token, H key heads, HV value heads, K key_dim, V value_dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from statemix.transitions import Transition

Change = Callable[["Axes", Tensor], Tensor]
Make = Callable[["Sizes", torch.Generator], "Problem"]


@dataclass(frozen=True)
class Sizes:
    """Small and odd: three chunks of 16 with a ragged end, grouped heads, K != V."""

    batch: int = 2
    seq_len: int = 37
    num_heads: int = 2
    num_value_heads: int = 4
    key_dim: int = 8
    value_dim: int = 5


@dataclass(frozen=True)
class Subject:
    """What is checked: a name and a sampler of float64 problems in range."""

    name: str
    make: Make


@dataclass(frozen=True)
class Axes:
    """Where the axes of a tensor are, None where it has none, and what it holds."""

    batch: int | None = None
    token: int | None = None
    head: int | None = None
    is_key_head: bool = False
    is_log_decay: bool = False
    is_unit: bool = False
    is_vector: bool = False


@dataclass(frozen=True)
class Problem:
    """Arguments of a scan. The write key may be a tensor of the transition itself: changes keep that identity."""

    q: Tensor
    k: Tensor
    v: Tensor
    transition: Transition
    write: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every floating-point tensor once, by name."""
        by_identity = {id(x): (name, x) for name, x, _ in reversed(list(self.named()))}
        return dict(reversed(by_identity.values()))

    def map(self, change: Change) -> "Problem":
        """The problem with every tensor changed; a tensor that occurs twice is changed once."""
        done: dict[int, Tensor] = {}

        def once(axes: Axes, x: Tensor) -> Tensor:
            if id(x) not in done:
                done[id(x)] = change(axes, x)
            return done[id(x)]

        changed: dict[str, Any] = {
            name: once(axes, x) for name, x, axes in self.named() if not name.startswith("transition.")
        }
        blocks = self.transition.num_blocks
        transition = self.transition.map_tensors(lambda kind, x: once(_axes_of(kind, x, blocks), x))
        return replace(self, transition=transition, **changed)

    def to(self, dtype: torch.dtype) -> "Problem":
        return self.map(lambda _, x: x.to(dtype))

    def with_state(self, generator: torch.Generator) -> "Problem":
        """The problem with a random initial state."""
        shape = (self.q.shape[0], *self.v.shape[-2:], self.q.shape[-1])
        return replace(self, initial_state=torch.randn(shape, generator=generator, dtype=torch.float64))

    def leaves(self) -> "Problem":
        """Fresh leaves that require gradients."""
        return self.map(lambda _, x: x.detach().clone().requires_grad_())

    def tokens(self, start: int, end: int) -> "Problem":
        """The tokens start <= t < end."""
        return self.map(lambda axes, x: x if axes.token is None else x.narrow(axes.token, start, end - start))

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``scan``."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def named(self) -> Iterator[tuple[str, Tensor, Axes]]:
        """Name, tensor and axes of everything the problem holds, a shared tensor under each of its names."""
        head = self.k.ndim - 2
        plain = {
            "q": Axes(0, 1, 2, is_key_head=True, is_vector=True),
            "k": Axes(0, 1, head, is_key_head=True, is_vector=True),
            "v": Axes(0, 1, head, is_vector=True),
            "write": Axes(0, 1, head),
            "initial_state": Axes(0, None, 1),
        }
        for name, axes in plain.items():
            x = getattr(self, name)
            if x is not None:
                yield name, x, axes
        for name, x, kind in self.transition.tensors():
            yield f"transition.{name}", x, _axes_of(kind, x, self.transition.num_blocks)


def _axes_of(kind: Any, x: Tensor, blocks: int) -> Axes:
    has_tail = kind.has_channels or (blocks > 1 and x.ndim > (3 if kind.is_per_token else 1))
    head = x.ndim - (2 if has_tail else 1)
    token = 1 if kind.is_per_token else None
    batch = 0 if kind.is_per_token else None
    return Axes(batch, token, head, kind.is_per_key_head, kind.high == 0, kind.is_unit, kind.is_per_key_head)
