"""The calls whose kernels are compiled ahead of time: every kind of decay, head size, element type and layout.

Those that any transition may lead to are combined here; those of the recurrences that are timed come from the list of
the harness, so that a new one is compiled too.

A call runs on the meta device and its launches are recorded, so nothing here needs a GPU. A new family of kernels is
one more entry of ``CALLS`` and of ``configurations``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Literal

import torch
from torch import Tensor

from statemix.harness import Sizes
from statemix.harness.catalogue import InRange
from statemix.harness.recurrences import RECURRENCES, NamedRecurrence
from statemix.kernels.launch import Launch, recording
from statemix.kernels.launch_config import Arch, compile_for
from statemix.kernels.operands import ScanOperands

Decay = Literal["none", "fixed", "scalar", "diagonal"]

DECAYS: tuple[Decay, ...] = ("none", "fixed", "scalar", "diagonal")
DELTA_DECAYS: tuple[Decay, ...] = ("none", "scalar", "diagonal")
FLOAT32_SIZES = ((128, 128), (64, 64), (256, 256), (512, 512), (24, 40))
HEAD_SIZES = (*FLOAT32_SIZES, (128, 64), (64, 128), (100, 20), (16, 16))
BLOCK_SIZES = ((128, 128), (64, 64), (64, 128), (256, 256), (512, 512), (24, 40))


@dataclass(frozen=True)
class Layout:
    """Sizes of a batch: heads of queries, of keys, and of states, which are those of values unless blocks share one."""

    batch: int
    seq_len: int
    query_heads: int
    key_heads: int
    value_heads: int


# The number of heads is a compile-time constant, so it is the same where it does not matter.
MANY_HEADS = Layout(16, 2048, 16, 16, 16)
FEW_HEADS = Layout(1, 32768, 16, 16, 16)  # cut into segments
FEW_WIDE_HEADS = Layout(1, 32768, 2, 2, 2)  # cut at any width
GROUPED_HEADS = Layout(2, 8192, 4, 2, 8)

# Layout, is_packed, has_state and saves: one, and some in which each value occurs, cut into segments or not.
ONE = ((MANY_HEADS, False, True, True),)
EACH_VALUE = (*ONE, (FEW_HEADS, True, False, False), (FEW_HEADS, False, True, True))


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
        has_state: an initial state, and gradients of the final state and of the decay.
        saves: forward keeps what backward needs; otherwise backward computes it again.
        num_steps: n, micro-steps a token; this and what follows are of the delta family.
        is_tied: a is b.
        reads_before_decay: the first micro-step of a token reads the state before its decay.
        has_factors: an erase beta and a write for every micro-step.
        blocks: of the heads that share a value.
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
    num_steps: int = 1
    is_tied: bool = True
    reads_before_decay: bool = False
    has_factors: bool = True
    blocks: int = 1


def configurations() -> Iterator[Configuration]:
    """Every call that is compiled ahead, once."""
    of_recurrences = (configuration_of(x) for x in RECURRENCES.values() if x.is_timed)
    yield from dict.fromkeys(chain(_combinations(), of_recurrences))


def configuration_of(recurrence: NamedRecurrence) -> Configuration:
    """The call of a recurrence with heads, or blocks, of 128 channels."""
    x, uses, blocks = recurrence, recurrence.uses, recurrence.blocks
    transition, _ = x.build(x.draw(Sizes(seq_len=1, key_dim=2 * blocks), InRange(torch.Generator())))
    decays: dict[str, Decay] = {"fixed_decay": "fixed", "scalar_decay": "scalar", "channel_decay": "diagonal"}
    decay = next((decays[name] for name in uses if name in decays), "none")
    if x.kernels == "additive":
        return Configuration("additive", decay, 128, 128)
    return Configuration(
        "delta",
        decay,
        128,
        128,
        num_steps=2 * x.count if "direction" in uses else x.count,  # in another direction a write has its own
        is_tied="channel_rate" not in uses,
        has_factors="channel_rate" not in uses,
        reads_before_decay=transition.lower().reads_before_decay,
        blocks=blocks,
    )


def _combinations() -> Iterator[Configuration]:
    """Each kind of decay meets each head size, since those two choose the tiles."""
    for decay, (key_dim, value_dim) in product(DECAYS, HEAD_SIZES):
        yield Configuration("recurrent", decay, key_dim, value_dim)
        is_usual = key_dim == value_dim == 128
        for layout, packed, has_state, saves in EACH_VALUE if is_usual else ONE:
            yield Configuration(
                "additive", decay, key_dim, value_dim, layout=layout, is_packed=packed, has_state=has_state, saves=saves
            )
    for kernels, decay in product(("additive", "recurrent"), DECAYS):
        for key_dim, value_dim in FLOAT32_SIZES:
            yield Configuration(kernels, decay, key_dim, value_dim, torch.float32)
        yield Configuration(kernels, decay, 128, 128, torch.float16)
        yield Configuration(kernels, decay, 24, 40, gate_dtype=torch.bfloat16, layout=GROUPED_HEADS)
    for decay in DECAYS:
        yield Configuration("additive", decay, 256, 256, layout=FEW_HEADS)
        yield Configuration("additive", decay, 128, 128, torch.float32, layout=FEW_HEADS)
    yield Configuration("additive", "diagonal", 512, 512, layout=FEW_HEADS)
    yield from _delta_configurations()
    yield Configuration("delta", "scalar", 512, 512, layout=FEW_WIDE_HEADS)
    yield from _delta_recurrent_configurations()


def _delta_configurations() -> Iterator[Configuration]:
    """Each decay meets each head size; everything else varies at heads of 128, alone or where two of them meet."""
    for decay in DELTA_DECAYS:
        for key_dim, value_dim in HEAD_SIZES:
            yield Configuration("delta", decay, key_dim, value_dim)
        for key_dim, value_dim in FLOAT32_SIZES:
            yield Configuration("delta", decay, key_dim, value_dim, torch.float32)
        usual = Configuration("delta", decay, 128, 128)
        yield replace(usual, dtype=torch.float16)
        yield replace(usual, layout=FEW_HEADS)
        yield replace(usual, layout=FEW_HEADS, is_packed=True, has_state=False, saves=False)
        yield replace(usual, layout=FEW_HEADS, key_dim=256, value_dim=256)
        yield replace(usual, layout=FEW_HEADS, dtype=torch.float32)
        yield replace(usual, has_factors=False)
        yield replace(usual, num_steps=2)
        yield replace(usual, is_tied=False)
        yield replace(usual, num_steps=2, is_tied=False)
        if decay != "none":
            yield replace(usual, reads_before_decay=True)
            yield replace(usual, reads_before_decay=True, num_steps=2, is_tied=False)
        grouped = Configuration("delta", decay, 24, 40, gate_dtype=torch.bfloat16, layout=GROUPED_HEADS)
        yield grouped
        yield replace(grouped, num_steps=3, is_tied=False, is_packed=True)
        yield from _block_configurations(decay)


def _block_configurations(decay: Decay) -> Iterator[Configuration]:
    """Two blocks a head: of the usual sizes, and at 128 what else outputs depend on."""
    for key_dim, value_dim in BLOCK_SIZES:
        yield Configuration("delta", decay, key_dim, value_dim, blocks=2)
    usual = Configuration("delta", decay, 128, 128, blocks=2)
    yield replace(usual, dtype=torch.float32)
    yield replace(usual, num_steps=2, is_tied=False, has_factors=False, has_state=False, saves=False)
    yield replace(usual, layout=FEW_HEADS, is_packed=True)
    if decay != "none":
        yield replace(usual, reads_before_decay=True)


def _delta_recurrent_configurations() -> Iterator[Configuration]:
    """Few: the tiles are those of the additive family, and only the micro-steps of a token differ."""
    name = "delta_recurrent"
    for decay in DELTA_DECAYS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield Configuration(name, decay, 128, 128, dtype)
        yield Configuration(name, decay, 512, 512, num_steps=2)
        for reads_before_decay in (False, True) if decay != "none" else (False,):
            free = Configuration(name, decay, 24, 40, gate_dtype=torch.bfloat16, num_steps=3, is_tied=False)
            free = replace(free, layout=GROUPED_HEADS, is_packed=True, has_state=False)
            yield replace(free, reads_before_decay=reads_before_decay)


# Few and telling, for every run of the tests: widest and narrowest heads, segments and documents, every kind of decay,
# and of the kernels that both families run under a diagonal one, the delta family's variants.
SAMPLE = (
    Configuration("additive", "none", 512, 512),
    Configuration("additive", "fixed", 24, 40, torch.float32, layout=FEW_HEADS, is_packed=True),
    Configuration("delta", "scalar", 128, 128),
    Configuration("delta", "diagonal", 128, 128, num_steps=2, is_tied=False, blocks=2),
    Configuration("delta_recurrent", "diagonal", 128, 128, num_steps=2, is_tied=False, reads_before_decay=True),
)


def label(configuration: Configuration) -> str:
    """A configuration in words: what is named is there."""
    c = configuration
    words = [c.kernels, c.decay, f"K{c.key_dim} V{c.value_dim}", str(c.dtype).removeprefix("torch.")]
    words.append(f"B{c.layout.batch} T{c.layout.seq_len}")
    words.append(f"HQ{c.layout.query_heads} HK{c.layout.key_heads} HV{c.layout.value_heads}")
    if c.num_steps > 1:
        words.append(f"n{c.num_steps}")
    if c.blocks > 1:
        words.append(f"blocks{c.blocks}")
    switches = {
        "packed": c.is_packed,
        "state": c.has_state,
        "saved": c.saves,
        "16-bit gate": c.gate_dtype != torch.float32,
    }
    switches |= {"free": not c.is_tied, "reads before decay": c.reads_before_decay, "no factors": not c.has_factors}
    return " ".join(words + [word for word, is_on in switches.items() if is_on])


def record(configuration: Configuration, arch: Arch) -> list[Launch]:
    """The launches of a call as a device of ``arch`` would get them."""
    with compile_for(arch), recording() as launches:
        CALLS[configuration.kernels](configuration)
    return launches


def _tokens(c: Configuration) -> tuple[int, int]:
    """Batch and length: packed documents are one sequence."""
    return (1, c.layout.batch * c.layout.seq_len) if c.is_packed else (c.layout.batch, c.layout.seq_len)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _log_decay(c: Configuration) -> Tensor | None:
    heads = c.layout.value_heads
    shapes: dict[Decay, tuple[int, ...]] = {
        "fixed": (heads,),
        "scalar": (*_tokens(c), heads),
        "diagonal": (*_tokens(c), heads, c.key_dim),
    }
    return None if c.decay == "none" else _empty(*shapes[c.decay], dtype=c.gate_dtype)


def _initial_state(c: Configuration) -> Tensor | None:
    shape = (c.layout.batch, c.layout.value_heads, c.value_dim, c.key_dim)
    return _empty(*shape, dtype=torch.float32) if c.has_state else None


def _cu_seqlens(c: Configuration) -> Tensor | None:
    return _empty(c.layout.batch + 1, dtype=torch.int32) if c.is_packed else None


def _operands(c: Configuration) -> ScanOperands:
    """Meta tensors of a configuration; an a of its own has a head for each state."""
    (batch, seq_len), erases = _tokens(c), c.kernels.startswith("delta")
    rows, heads = (batch, seq_len * c.num_steps), c.layout.value_heads
    factor = _empty(*rows, heads, dtype=c.gate_dtype) if erases and c.has_factors else None
    return ScanOperands(
        q=_empty(batch, seq_len, c.layout.query_heads, c.key_dim, dtype=c.dtype),
        a=None if c.is_tied else _empty(*rows, heads, c.key_dim, dtype=c.dtype),
        b=_empty(*rows, c.layout.key_heads, c.key_dim, dtype=c.dtype),
        v=_empty(*rows, heads // c.blocks, c.value_dim, dtype=c.dtype),
        erase_beta=factor,
        write=factor,
        log_decay=_log_decay(c),
        initial_state=_initial_state(c),
        cu_seqlens=_cu_seqlens(c),
        erases=erases,
        reads_before_decay=c.reads_before_decay,
        blocks=c.blocks,
    )


def _both_passes(c: Configuration) -> None:
    from statemix.kernels.triton import additive, delta

    x, wanted = _operands(c), c.has_state and c.decay != "none"
    kernels = delta if x.erases else additive
    output, _, saved = kernels.forward(x, scale=0.5, save=c.saves)
    kernels.backward(output, x.initial_state, x, saved, scale=0.5, needs_decay_grad=wanted)


def _recurrent(c: Configuration) -> None:
    from statemix.kernels.triton.recurrent import recurrent_forward

    recurrent_forward(_operands(c), scale=0.5)


CALLS: dict[str, Callable[[Configuration], None]] = {
    "additive": _both_passes,
    "recurrent": _recurrent,
    "delta": _both_passes,
    "delta_recurrent": _recurrent,
}
