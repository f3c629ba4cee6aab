"""What a mixer carries from one call to the next: frozen values, one row a sequence.

A state is never changed in place: a call takes one and returns another, so a kept state can be used again, and
rows can be reordered (beam search), repeated (several samples of one prompt) or dropped (finished sequences).

Shapes: B sequences, HV value heads, V rows of a state (value_dim, and one more for the sum of weights of a normaliser),
K key_dim, W convolution width, L cached keys, D head_dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeVar, dataclass_transform

import torch
from torch import Tensor


class StateError(ValueError):
    """A state that does not belong to the layer, the model or the batch it was passed to."""


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class MixerState:
    """Base of the states. A class that derives from it is a frozen dataclass of tensors, each with a row a sequence."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def select(self, index: Tensor | Sequence[int]) -> Self:
        """Rows ``index`` of the state: reorders, repeats or drops sequences."""
        return type(self)(*(_rows(tensor, index) for tensor in _tensors(self)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in _tensors(self))


class StateMixerState(MixerState):
    """State of a ``StateMixer``: fixed size, whatever the number of tokens seen.

    Attributes:
        recurrent: S_t, [B, HV, V, K].
        conv: the last W - 1 inputs of the short convolution, [B, W - 1, channels]; zeros before the first token.
        position: of the next token, [B, 1] int64 in a mixer with rotary positions, [B, 0] in others.
    """

    recurrent: Tensor
    conv: Tensor
    position: Tensor


class AttentionState(MixerState):
    """State of an ``Attention`` layer: the keys and values that later tokens may still look at.

    Row b holds its ``min(length[b], L)`` newest tokens at the right end; what lies to their left is never read.

    Attributes:
        key: rotated keys, [B, L, Hkv, D].
        value: values, [B, L, Hkv, D].
        length: tokens seen by each row, hence the position of its next token, [B] int64.
    """

    key: Tensor
    value: Tensor
    length: Tensor


S = TypeVar("S", bound=MixerState)


def opened(state: object, empty: S) -> S:
    """``state``, which must be of the class and the sizes of ``empty``; ``empty`` itself where there is none.

    Raises:
        StateError: as ``check_state``.
    """
    shapes = {field.name: tuple(getattr(empty, field.name).shape) for field in fields(empty)}
    return empty if state is None else check_state(state, type(empty), shapes=shapes)


def check_state(state: object, kind: type[S], *, shapes: Mapping[str, tuple[int | None, ...]]) -> S:
    """Return ``state`` typed as ``kind``.

    Args:
        state: what the caller passed in.
        kind: the state class of the layer.
        shapes: expected shape of each field; None stands for any size.

    Raises:
        StateError: another class, another number of rows, or the sizes of another layer.
    """
    if not isinstance(state, kind):
        raise StateError(
            f"state: expected {kind.__name__}, got {type(state).__name__}; pass what this layer returned, or None"
        )
    for name, expected in shapes.items():
        got = tuple(getattr(state, name).shape)
        if len(got) != len(expected) or any(e not in (None, g) for e, g in zip(expected, got, strict=True)):
            raise StateError(
                f"state.{name}: expected shape {_spell(expected)}, got {_spell(got)}; "
                "the first size is the batch (or the number of packed documents), state.select(index) changes it"
            )
    return state


def keep_last(stream: Tensor, size: int) -> Tensor:
    """The last ``size`` places of ``stream`` [B, T, ...], or all when there are fewer.

    A copy: a view would keep the whole stream alive for as long as the state lives.
    """
    return stream[:, max(stream.shape[1] - size, 0) :].clone()


def _tensors(state: MixerState) -> list[Tensor]:
    return [getattr(state, field.name) for field in fields(state)]


def _rows(tensor: Tensor, index: Tensor | Sequence[int]) -> Tensor:
    """Rows by number, or by a mask of one bool a row."""
    chosen, rows = torch.as_tensor(index, device=tensor.device), tensor.shape[0]
    if chosen.dtype == torch.bool and chosen.shape == (rows,):
        chosen = chosen.nonzero().flatten()
    is_number = chosen.numel() == 0 or chosen.dtype in (torch.int64, torch.int32)
    if not is_number or chosen.ndim != 1 or bool(((chosen < 0) | (chosen >= rows)).any()):
        raise StateError(f"index: expected rows from 0 to {rows - 1}, or a mask of {rows} bools, got {index!r}")
    return tensor.index_select(0, chosen.long())


def _spell(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
