"""The calls whose kernels are compiled ahead of time: every kind of decay, head size, element type and layout.

A call runs on the meta device and its launches are recorded, so nothing here needs a GPU. A new family of kernels is
one more entry of ``CALLS`` and of ``configurations``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from statemix.kernels.additive_operands import AdditiveOperands
from statemix.kernels.launch import Launch, recording
from statemix.kernels.launch_config import Family, compile_for

Decay = Literal["none", "fixed", "scalar", "diagonal"]

DECAYS: tuple[Decay, ...] = ("none", "fixed", "scalar", "diagonal")
FLOAT32_SIZES = ((128, 128), (64, 64), (256, 256), (512, 512), (24, 40))
HEAD_SIZES = (*FLOAT32_SIZES, (128, 64), (64, 128), (100, 20), (16, 16))


@dataclass(frozen=True)
class Layout:
    """Sizes of a batch: heads of queries, of keys and of values."""

    batch: int
    seq_len: int
    query_heads: int
    key_heads: int
    value_heads: int


# The number of heads is a compile-time constant, so it is the same where it does not matter.
MANY_HEADS = Layout(16, 2048, 16, 16, 16)
FEW_HEADS = Layout(1, 32768, 16, 16, 16)  # cut into segments
GROUPED_HEADS = Layout(2, 8192, 4, 2, 8)

# Layout, is_packed, has_state and saves: one row, and rows in which each value occurs.
ONE = ((MANY_HEADS, False, True, True),)
EACH_VALUE = (*ONE, (FEW_HEADS, True, False, False))


@dataclass(frozen=True)
class Configuration:
    """One call, forward and backward.

    Attributes:
        kernels: a name of ``CALLS``.
        decay: its kind.
        key_dim, value_dim: K and V.
        dtype: of q, k, v and of the gradients.
        gate_dtype: of log_decay.
        layout: batch, length and heads.
        is_packed: documents with offsets in place of a batch.
        has_state: an initial state, a gradient of the final state, and a gradient of the decay wanted.
        saves: forward keeps what backward needs; otherwise backward computes it again.
    """

    kernels: str
    decay: Decay
    key_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.float32
    layout: Layout = MANY_HEADS
    is_packed: bool = False
    has_state: bool = True
    saves: bool = True


def configurations() -> Iterator[Configuration]:
    """Every call that is compiled ahead: each kind of decay meets each head size, since those two choose the tiles."""
    for decay, (key_dim, value_dim) in product(DECAYS, HEAD_SIZES):
        yield Configuration("recurrent", decay, key_dim, value_dim)
        is_usual = key_dim == value_dim == 128
        for layout, packed, has_state, saves in EACH_VALUE if is_usual else ONE:
            yield Configuration(
                "additive", decay, key_dim, value_dim, layout=layout, is_packed=packed, has_state=has_state, saves=saves
            )
    for kernels, decay in product(CALLS, DECAYS):
        for key_dim, value_dim in FLOAT32_SIZES:
            yield Configuration(kernels, decay, key_dim, value_dim, torch.float32)
        yield Configuration(kernels, decay, 128, 128, torch.float16)
        yield Configuration(kernels, decay, 24, 40, gate_dtype=torch.bfloat16, layout=GROUPED_HEADS)


# Few and telling, for every run of the tests: widest and narrowest heads, segments and documents, every kind of decay.
SAMPLE = (
    Configuration("additive", "none", 512, 512, saves=False),
    Configuration("additive", "fixed", 24, 40, torch.float32, layout=FEW_HEADS, is_packed=True),
    Configuration("additive", "scalar", 128, 128),
    Configuration("additive", "diagonal", 256, 256),
    Configuration("recurrent", "diagonal", 100, 20, torch.float16),
)


def label(configuration: Configuration) -> str:
    """A configuration in words: what is named is there."""
    c = configuration
    words = [c.kernels, c.decay, f"K{c.key_dim} V{c.value_dim}", str(c.dtype).removeprefix("torch.")]
    words.append(f"B{c.layout.batch} T{c.layout.seq_len}")
    words.append(f"HQ{c.layout.query_heads} HK{c.layout.key_heads} HV{c.layout.value_heads}")
    said = {"packed": c.is_packed, "state": c.has_state, "saved": c.saves, "16-bit gate": c.gate_dtype != torch.float32}
    return " ".join(words + [word for word, holds in said.items() if holds])


def record(configuration: Configuration, family: Family) -> list[Launch]:
    """The launches of a call as a device of ``family`` would be given them."""
    with compile_for(family), recording() as launches:
        CALLS[configuration.kernels](configuration)
    return launches


def _inputs(c: Configuration) -> AdditiveOperands:
    """Meta tensors of a configuration."""
    batch, seq_len = (1, c.layout.batch * c.layout.seq_len) if c.is_packed else (c.layout.batch, c.layout.seq_len)
    num_states = c.layout.batch

    def empty(*shape: int, dtype: torch.dtype = c.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads = c.layout.value_heads
    gates: dict[Decay, tuple[int, ...]] = {
        "fixed": (heads,),
        "scalar": (batch, seq_len, heads),
        "diagonal": (batch, seq_len, heads, c.key_dim),
    }
    return AdditiveOperands(
        q=empty(batch, seq_len, c.layout.query_heads, c.key_dim),
        k=empty(batch, seq_len, c.layout.key_heads, c.key_dim),
        v=empty(batch, seq_len, heads, c.value_dim),
        log_decay=None if c.decay == "none" else empty(*gates[c.decay], dtype=c.gate_dtype),
        initial_state=empty(num_states, heads, c.value_dim, c.key_dim, dtype=torch.float32) if c.has_state else None,
        cu_seqlens=empty(num_states + 1, dtype=torch.int32) if c.is_packed else None,
    )


def _additive(c: Configuration) -> None:
    from statemix.kernels.additive_triton import additive_backward, additive_forward

    x = _inputs(c)
    output, _, saved = additive_forward(x, scale=0.5, save=c.saves)
    wanted = c.has_state and c.decay != "none"
    additive_backward(output, x.initial_state, x, saved, scale=0.5, needs_decay_grad=wanted)


def _recurrent(c: Configuration) -> None:
    from statemix.kernels.recurrent_triton import recurrent_forward

    recurrent_forward(_inputs(c), scale=0.5)


CALLS: dict[str, Callable[[Configuration], None]] = {"additive": _additive, "recurrent": _recurrent}
