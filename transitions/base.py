"""What every transition is: an immutable value that holds per-token tensors and acts on the state.

    S_t = S_{t-1} M_t + w_t v_t k_t^T        o_t = scale * S_t q_t        S in R^{V x K}

A subclass names its tensors as annotated fields and defines ``apply``, S -> S M_t for one token. That is enough to run,
to be composed and to train; ``lower`` adds the chunk form. See ``kinds.py`` for the annotations.

Shapes: B batch, T time, H key heads, HV value heads, K key_dim, V value_dim.
"""

import contextlib
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, dataclass_transform, get_type_hints

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from statemix.kernels import NormalForm, expand_heads

from .kinds import Kind

Apply = Callable[[Any, Tensor], Tensor]

_CHILD = "child"  # stands in a pytree's context where a child goes


@dataclass_transform(frozen_default=True, eq_default=False)
class Transition(ABC):
    """M_t as a value: a frozen dataclass made of its annotated fields.

    Attributes:
        is_diagonal: M_t is diagonal, a gate.
        lowers_blocks: ``lower`` and ``natural_write`` hand rates and scalar decays on as they are, so that in blocks
            they may have a last axis of them. Otherwise ``BlockDiagonal`` asks for blocks as heads, which are copied.
        eigenvalue_range: interval that holds every eigenvalue of M_t, where the spectrum is real.
        spectral_radius: bound on |eigenvalue|, where it is not; None when nothing is known.
    """

    is_diagonal: ClassVar[bool] = False
    lowers_blocks: ClassVar[bool] = False

    _composition: ClassVar[Callable[["Transition", "Transition"], "Transition"]]

    def __init_subclass__(cls, *, is_composition: bool = False) -> None:
        """Make the class a frozen dataclass and a pytree; ``is_composition`` is for the class that ``@`` makes."""
        super().__init_subclass__()
        dataclass(frozen=True, eq=False, repr=False)(cls)
        if "apply" in cls.__dict__:
            cls.apply = _one_write_and_value_heads(cls.apply)  # type: ignore[assignment, method-assign]
        register_pytree_node(cls, cls._flatten, functools.partial(_unflatten, cls))
        if is_composition:
            Transition._composition = cls
        with contextlib.suppress(NameError):  # annotations that name what is defined further down are read later
            cls.layout()

    @property
    def eigenvalue_range(self) -> tuple[float, float] | None:
        return None

    @property
    def spectral_radius(self) -> float | None:
        return None if self.eigenvalue_range is None else max(map(abs, self.eigenvalue_range))

    @abstractmethod
    def apply(self, state: Tensor) -> Tensor:
        """S M_t for one token: state [..., HV, V, K], the fields without their T axis and with HV heads."""

    def lower(self) -> NormalForm:
        """The normal form that the chunk form and the kernels run; NotImplementedError where there is none.

        Where a = beta c with beta a number for each head, erase=(c, b) and erase_beta=beta spare a copy of beta c.
        """
        raise NotImplementedError(f"{type(self).__name__} has no normal form: it runs in form='recurrent'")

    def steps(self) -> tuple["Transition", ...]:
        """The factors of M_t with one write each, in the order they act."""
        return (self,)

    def matrix(self, key_dim: int) -> Tensor:
        """Dense M_t of a single step, [..., K, K]; by default the image of the identity under ``apply``."""
        leads = [x.shape[:-1] if kind.has_channels else x.shape for _, x, kind in self.tensors()]
        lead = max(leads, key=lambda shape: (len(shape), shape[-1]), default=())  # [..., HV]
        like = next((x for _, x, _ in self.tensors()), torch.empty(0))
        return self.apply(torch.eye(key_dim, dtype=like.dtype, device=like.device).expand(*lead, key_dim, key_dim))

    def materialize(self, key_dim: int | None = None) -> Tensor:
        """Dense M_t, [B, T, HV, K, K] or a shape that broadcasts to it. For tests: costs K^2 a token.

        Args:
            key_dim: K, needed where no field has it (Identity, FixedDecay, ScalarGate).
        """
        key_dim = key_dim or self.key_dim
        if key_dim is None:
            raise ValueError(f"key_dim: expected an integer, got None; {type(self).__name__} holds no key dimension")
        return functools.reduce(torch.matmul, [step.matrix(key_dim) for step in self.steps()])

    def at(self, t: int) -> "Transition":
        """The transition of token t: fields without their T axis."""
        steps = self.steps()
        if steps[0] is not self:
            return functools.reduce(Transition._composition, [step.at(t) for step in steps])
        return self.map_tensors(lambda kind, x: x.select(1, t) if kind.is_per_token else x)

    def tokens(self, seq_len: int) -> list[Self]:
        """``at(t)`` for every t of a single step, in one pass: a select a token costs O(T^2) in the backward pass."""
        columns: list[Iterable[Any]] = []
        for name, kind in self.layout():
            x = getattr(self, name)
            if isinstance(x, Transition):
                columns.append(x.tokens(seq_len))
            elif kind is not None and kind.is_per_token:
                columns.append(x.unbind(1))
            else:
                columns.append(itertools.repeat(x, seq_len))
        if not columns:
            return [self] * seq_len
        return [self._rebuild(values) for values in zip(*columns, strict=True)]

    def __matmul__(self, other: "Transition") -> "Transition":
        """M = (M of self)(M of other): self acts on the state first."""
        return Transition._composition(self, other) if isinstance(other, Transition) else NotImplemented

    @classmethod
    def example(
        cls, batch: int, seq_len: int, num_heads: int, key_dim: int, generator: torch.Generator | None = None
    ) -> Self:
        """A random instance in range, float64, with as many value heads as key heads."""
        drawn = []
        for name, kind in cls.layout():
            if kind is None:
                raise NotImplementedError(f"{cls.__name__}.example: field {name!r} has no kind; override example")
            drawn.append(kind.sample(kind.shape(batch, seq_len, num_heads, num_heads, key_dim), generator))
        return cls(*drawn)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """``Tensor.to`` on every tensor."""
        return self.map_tensors(lambda _, x: x.to(*args, **kwargs))

    def detach(self) -> Self:
        return self.map_tensors(lambda _, x: x.detach())

    def tensors(self, prefix: str = "") -> Iterable[tuple[str, Tensor, Kind]]:
        """Name, tensor and kind of every tensor, nested transitions included."""
        for name, kind in self.layout():
            x = getattr(self, name)
            if isinstance(x, Transition):
                yield from x.tensors(f"{prefix}{name}.")
            elif kind is not None:
                yield f"{prefix}{name}", x, kind

    def own_tensors(self) -> Iterable[tuple[str, Tensor, Kind]]:
        """``tensors`` without those of nested transitions."""
        return ((name, getattr(self, name), kind) for name, kind in self.layout() if kind is not None)

    def map_tensors(self, change: Callable[[Kind, Tensor], Tensor]) -> Self:
        """The same transition with ``change(kind, tensor)`` for every tensor."""
        values = []
        for name, kind in self.layout():
            x = getattr(self, name)
            if isinstance(x, Transition):
                x = x.map_tensors(change)
            elif kind is not None:
                x = change(kind, x)
            values.append(x)
        return self._rebuild(values)

    def expand_heads(self, num_value_heads: int) -> Self:
        """Repeat key heads so that value head h has its own copy of key head h // (HV / H)."""
        if all(not kind.is_per_key_head or x.shape[-2] == num_value_heads for _, x, kind in self.tensors()):
            return self
        return self.map_tensors(
            lambda kind, x: expand_heads(x, num_value_heads, x.ndim - 2) if kind.is_per_key_head else x
        )

    @property
    def key_dim(self) -> int | None:
        """K, where a field has it."""
        return next((x.shape[-1] for _, x, kind in self.tensors() if kind.has_channels), None)

    @property
    def write_key(self) -> Tensor | None:
        """The field named ``key``: where it exists, the key of the write v k^T is this very tensor."""
        return getattr(self, "key", None)

    @property
    def natural_write(self) -> Tensor | None:
        """The write that goes with M_t where none is given, such as the delta rule's beta; None means 1."""
        return None

    @property
    def num_value_heads(self) -> int | None:
        """HV, where a field has it."""
        heads = [
            x.shape[-2 if kind.has_channels else -1] for _, x, kind in self.own_tensors() if not kind.is_per_key_head
        ]
        parts = [getattr(self, name) for name, _ in self.layout()]
        heads += [x.num_value_heads for x in parts if isinstance(x, Transition) and x.num_value_heads is not None]
        return max(heads, default=None)

    @property
    def num_blocks(self) -> int:
        """Diagonal blocks of M_t; a write may differ between them."""
        return 1

    def __repr__(self) -> str:
        parts = [f"{name}={_brief(getattr(self, name))}" for name, _ in self.layout()]
        return f"{type(self).__name__}({', '.join(parts)})"

    @classmethod
    def layout(cls) -> list[tuple[str, Kind | None]]:
        """Field names with their kinds; None for what is not a tensor."""
        if "_fields_and_kinds" not in cls.__dict__:
            hints = get_type_hints(cls, include_extras=True)
            kinds = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
            names = [f.name for f in _fields(cls)]
            found = [(name, next((m for m in kinds[name] if isinstance(m, Kind)), None)) for name in names]
            cls._fields_and_kinds = found  # type: ignore[attr-defined]
        return cls._fields_and_kinds  # type: ignore[attr-defined]

    def _rebuild(self, values: Iterable[Any]) -> Self:
        """A copy with other field values, past ``__post_init__``: that reads the shapes of whole sequences."""
        rebuilt = object.__new__(type(self))
        for (name, _), value in zip(self.layout(), values, strict=True):
            object.__setattr__(rebuilt, name, value)
        return rebuilt

    def _flatten(self) -> tuple[list[Any], tuple[Any, ...]]:
        """Tensors and nested transitions as children; what is neither, such as a number of blocks, as context."""
        values = [getattr(self, name) for name, _ in self.layout()]
        is_child = [
            kind is not None or isinstance(x, Transition) for x, (_, kind) in zip(values, self.layout(), strict=True)
        ]
        children = [x for x, child in zip(values, is_child, strict=True) if child]
        return children, tuple(_CHILD if child else x for x, child in zip(values, is_child, strict=True))


def _unflatten(cls: type[Transition], children: Iterable[Any], context: tuple[Any, ...]) -> Transition:
    rest = iter(children)
    return object.__new__(cls)._rebuild(next(rest) if x == _CHILD else x for x in context)


def _one_write_and_value_heads(apply: Apply) -> Apply:
    """Let ``apply`` see the fields of one step, with key heads repeated to the value heads of the state."""

    @functools.wraps(apply)
    def wrapped(self: Transition, state: Tensor) -> Tensor:
        steps = self.steps()
        if steps[0] is not self:
            return functools.reduce(lambda s, step: step.apply(s), steps, state)
        return apply(self.expand_heads(state.shape[-3]), state)

    return wrapped


def _fields(cls: type) -> tuple[Any, ...]:
    return fields(cls)


def _brief(x: Any) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else repr(x)
