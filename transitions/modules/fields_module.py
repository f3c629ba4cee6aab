"""The module that a transition gets when it brings none: each annotated field has a projection of its own, by its kind.

    log decays            -exp(A_log) softplus(W x + dt_bias)     LogDecay, KeyLogDecay
    bounded values        low + (high - low) sigmoid(W x)         Rate, Rate2, KeyRate
    unit vectors          W x / |W x|, per head and block         UnitKey
    unbounded values      W x                                     Key
    constant log decays   log(1 - 2^(-5 - h)), not trained        Constant

A field named ``key`` is the write key of the mixer itself, and the write is the transition's ``natural_write``.

Shapes: B batch, T time, H key heads, HV value heads, K key_dim, b blocks.
Sources: see ``decay_rate.py`` and ``fixed_decay.py``.
"""

import inspect
import math
import re
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import create_model
from torch import Tensor, nn

from statemix.transitions.base import Transition
from statemix.transitions.block_diagonal import BlockDiagonal
from statemix.transitions.fixed_decay import FixedDecayModule
from statemix.transitions.kinds import Kind

from .decay_rate import SoftplusDecay
from .module import FactorConfig, HeadSizes, TransitionModule, at_least_float32
from .registry import register

WRITE_KEY = "key"

AnyTransition = TypeVar("AnyTransition", bound=type[Transition])


def register_transition(cls: AnyTransition) -> AnyTransition:
    """Let recipes name a transition, ``my_transition`` for the class ``MyTransition``; also a class decorator.

    Raises:
        ValueError: the class has no ``apply``, a field has no default projection, or the name is taken.
    """
    register(fields_module(cls))
    return cls


def recipe_name(cls: type) -> str:
    """The name of a class in recipes: MyTransition is my_transition, GDN2Erase is gdn2_erase."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()


def fields_module(cls: type[Transition]) -> type[TransitionModule]:
    """A ``TransitionModule`` for ``cls`` with a projection for every field."""
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"{cls.__name__}: expected a method apply(self, state) -> state, got a class without it")
    for name, kind in cls.layout():
        _expect_default(cls, name, kind)
    name = recipe_name(cls)
    # The name is known only now, so the type checker cannot read this Literal.
    config = create_model(f"{cls.__name__}Config", __base__=FactorConfig, type=(Literal[name], name))  # type: ignore[arg-type]
    body = {"__module__": cls.__module__, "__doc__": cls.__doc__, "Config": config, "transition": cls}
    return type(f"{cls.__name__}Module", (FieldsModule,), body)


class FieldsModule(TransitionModule):
    """Makes ``transition`` from hidden states, field by field; ``fields_module`` derives one for each transition."""

    transition: ClassVar[type[Transition]]

    def __init__(self, config: FactorConfig, sizes: HeadSizes) -> None:
        super().__init__()
        self.blocks, self.formula = sizes.blocks, _summary(self.transition)
        self.kinds = {name: kind for name, kind in self.transition.layout() if kind is not None}
        self.needs_unit_keys = WRITE_KEY in self.kinds and self.kinds[WRITE_KEY].is_unit
        for name, kind in self.kinds.items():
            if name != WRITE_KEY:
                source = FieldProjection(kind, sizes) if kind.is_per_token else FieldConstant(sizes)
                self.add_module(f"make_{name}", source)  # a bare name such as "keys" or "type" could hide an attribute

    def reset_parameters(self) -> None:
        for source in self.children():
            assert isinstance(source, FieldProjection | FieldConstant)
            source.reset_parameters()

    def forward(self, hidden: Tensor, key: Tensor) -> tuple[Transition, Tensor | None]:
        fields = {name: key if name == WRITE_KEY else getattr(self, f"make_{name}")(hidden) for name in self.kinds}
        transition = self.transition(**fields)
        # Inside a block-diagonal transition a write belongs to a block, which only that one knows of.
        whole = transition if self.blocks == 1 else BlockDiagonal(transition, self.blocks)
        return transition, whole.natural_write


class FieldProjection(nn.Module):
    """One field from hidden states: [B, T, hidden_size] -> [B, T, heads], [B, T, heads, b] or [B, T, heads, K]."""

    def __init__(self, kind: Kind, sizes: HeadSizes) -> None:
        super().__init__()
        self.kind, self.blocks, self.key_dim = kind, sizes.blocks, sizes.key_dim
        num_heads = sizes.num_heads if kind.is_per_key_head else sizes.num_value_heads
        num_scalars = num_heads * sizes.blocks
        num_outputs = num_heads * sizes.key_dim if kind.has_channels else num_scalars
        self.linear = nn.Linear(sizes.hidden_size, num_outputs, bias=False)
        self.decay: SoftplusDecay | None = None
        if _is_log_decay(kind):
            self.decay = SoftplusDecay(num_heads, sizes.key_dim) if kind.has_channels else SoftplusDecay(num_scalars)

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        if self.decay is not None:
            self.decay.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        x, kind = self.linear(hidden), self.kind
        if kind.has_channels:
            x = x.unflatten(-1, (-1, self.key_dim))
        if self.decay is not None:
            x, _ = self.decay(x)
        elif kind.is_unit:
            x = _unit_length(x.unflatten(-1, (self.blocks, -1))).flatten(-2)
        elif math.isfinite(kind.low):
            x = kind.low + (kind.high - kind.low) * torch.sigmoid(at_least_float32(x))
        return x if kind.has_channels or self.blocks == 1 else x.unflatten(-1, (-1, self.blocks))


class FieldConstant(nn.Module):
    """A constant log decay for each value head, that of RetNet: [HV]."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.fixed = FixedDecayModule(FixedDecayModule.Config(), sizes)

    def reset_parameters(self) -> None:
        self.fixed.reset_parameters()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fixed.log_decay


def _is_log_decay(kind: Kind) -> bool:
    return kind.high == 0 and kind.low == -math.inf


def _expect_default(cls: type[Transition], name: str, kind: Kind | None) -> None:
    """Raise ValueError where nothing says how to make a field from hidden states."""
    advice = "or write a TransitionModule and register it"
    if kind is None:
        if not hasattr(cls, name):  # without a default
            raise ValueError(
                f"{cls.__name__}.{name}: expected a kind such as LogDecay, Rate or UnitKey as its annotation, or a "
                f"default value; annotate it, {advice}"
            )
    elif name == WRITE_KEY and not (kind.is_per_key_head and kind.has_channels):
        raise ValueError(
            f"{cls.__name__}.{name}: expected UnitKey or Key, for a field of this name is the write key of the mixer, "
            f"got {kind.name}; rename it"
        )
    elif not kind.is_per_token and (kind.has_channels or not _is_log_decay(kind)):
        raise ValueError(f"{cls.__name__}.{name}: no default for {kind.name}, a constant; use Constant, {advice}")
    elif math.isfinite(kind.low) != math.isfinite(kind.high) and not _is_log_decay(kind):
        raise ValueError(
            f"{cls.__name__}.{name}: no default projection into [{kind.low}, {kind.high}]; "
            f"bound it on both sides or on neither, {advice}"
        )


def _unit_length(x: Tensor) -> Tensor:
    """x / |x| over the last axis, in float32; a zero row stays zero, with a finite gradient."""
    wide = at_least_float32(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _summary(cls: type[Transition]) -> str:
    """The first line of the docstring, without its full stop; the name of a class that has only a generated one."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    is_written = doc and not doc.startswith(f"{cls.__name__}(")
    return doc.splitlines()[0].removesuffix(".") if is_written else cls.__name__
