"""The first call of a transition: a mistake that would make every check fail in its own words is named once.

A wrong shape out of ``apply``, a tensor without its time axis, a method that raises, a normal form of wrong shapes.

Shapes: B batch, T time, H key heads, HV value heads, K key_dim, V value_dim, m erasures a token.
"""

from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from statemix.kernels import NormalForm
from statemix.transitions import Kind, Transition

from .problem import Sizes
from .report import HarnessError
from .source_lines import failing_line, lines_of

Value = TypeVar("Value")


def expect_callable(cls: type[Transition], sizes: Sizes, *, seed: int = 0) -> None:
    """Make an example of ``cls`` and call its methods once.

    Raises:
        HarnessError: one of them raises, or returns what is no state, write or normal form; shows the lines.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = sizes.num_value_heads
    drawn = (sizes.batch, sizes.seq_len, heads, sizes.key_dim, generator)
    transition = _call(cls, "example", lambda: cls.example(*drawn))
    _expect_type(cls, "example", transition, cls)
    for name, x, kind in transition.own_tensors():
        _expect_field(cls, name, x, kind, list(kind.shape(sizes.batch, sizes.seq_len, heads, heads, sizes.key_dim)))
    state = torch.randn(
        sizes.batch, sizes.seq_len, heads, sizes.value_dim, sizes.key_dim, generator=generator, dtype=torch.float64
    )
    _expect_state(cls, transition.at(0), state[:, 0], "[B, HV, V, K]", "")
    _expect_state(
        cls, transition, state, "[B, T, HV, V, K]", ", for all tokens at once; count axes from the end: x[..., None]"
    )
    write = _call(cls, "natural_write", lambda: transition.natural_write)
    if write is not None and not transition.steps()[1:] and list(write.shape[:3]) != [*state.shape[:3]]:
        _refuse(cls, "natural_write", f"expected {[*state.shape[:3]]} = [B, T, HV], got {list(write.shape)}")
    _expect_normal_form(cls, transition, state)


def _call(cls: type[Transition], method: str, call: Callable[[], Value], where: str = "") -> Value:
    try:
        return call()
    except Exception as error:  # the user's code may raise anything
        message = f"{type(error).__name__}: {error}" if type(error) is not NotImplementedError else str(error)
        line = failing_line(error, cls, method)
        raise HarnessError(f"{cls.__name__}.{method}: raised {message}{where}{line or lines_of(cls, method)}") from None


def _refuse(cls: type[Transition], method: str, message: str) -> NoReturn:
    raise HarnessError(f"{cls.__name__}.{method}: {message}{lines_of(cls, method)}")


def _expect_type(cls: type[Transition], method: str, x: object, kind: type) -> None:
    if not isinstance(x, kind):
        forgotten = "; does it return?" if x is None else ""
        _refuse(cls, method, f"expected a {kind.__name__}, got {type(x).__name__}{forgotten}")


def _expect_field(cls: type[Transition], name: str, x: Tensor, kind: Kind, expected: list[int]) -> None:
    """The shape of its kind; what counts writes or blocks may have one axis more."""
    got, axes = list(x.shape), "B, T, " if kind.is_per_token else ""
    heads = f"{axes}{'H' if kind.is_per_key_head else 'HV'}{', K' if kind.has_channels else ''}"
    if got == expected or (len(got) == len(expected) + 1 and got[:2] == expected[:2]):
        return
    lacks_time = kind.is_per_token and got == expected[:1] + expected[2:]
    advice = "; it lacks the time axis T: every token has a value of its own" if lacks_time else ""
    raise HarnessError(
        f"{cls.__name__}.{name}: expected {expected} = [{heads}] for {kind.name}, got {got}{advice}"
        f"{lines_of(cls, 'example')}"
    )


def _expect_state(cls: type[Transition], transition: Transition, state: Tensor, axes: str, where: str) -> None:
    changed = _call(cls, "apply", lambda: transition.apply(state), where)
    _expect_type(cls, "apply", changed, Tensor)
    if changed.shape != state.shape:
        expected = f"expected a state of {list(state.shape)} = {axes}, as it was given"
        _refuse(cls, "apply", f"{expected}, got {list(changed.shape)}{where}")


def _expect_normal_form(cls: type[Transition], transition: Transition, state: Tensor) -> None:
    try:
        form = transition.lower()
    except NotImplementedError:
        return  # declared: there is none
    except Exception:
        form = _call(cls, "lower", transition.lower)
    _expect_type(cls, "lower", form, NormalForm)
    (batch, seq_len, heads, _, key_dim), blocks = state.shape, form.blocks
    tokens = [batch, seq_len, heads]
    scalar = [[heads], [heads, blocks], tokens, [*tokens, blocks]] if blocks > 1 else [[heads], tokens]
    if form.log_decay is not None:
        _expect_shape(cls, "log_decay", form.log_decay, *scalar, [*tokens, key_dim])
        if bool((form.log_decay > 0).any()):
            _refuse(cls, "lower", f"expected a log_decay <= 0, got {form.log_decay.max().item():.4g}")
    for name, x in zip(("erase[0]", "erase[1]"), form.erase or (), strict=False):
        _expect_shape(cls, name, x, [*tokens, key_dim], [batch, seq_len, *x.shape[2:-2], heads, key_dim])


def _expect_shape(cls: type[Transition], name: str, x: Tensor, *allowed: list[int]) -> None:
    if list(x.shape) not in allowed:
        shapes = " or ".join(map(str, allowed[:3]))
        _refuse(cls, "lower", f"expected {name} of {shapes}, got {list(x.shape)}")
