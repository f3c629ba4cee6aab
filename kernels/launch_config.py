"""Tile sizes of the kernels: one short table, keyed by device family, head sizes and element size.

Never keyed by the sequence length or the batch: a training run on packed documents must not compile anew every step.
Rows for Hopper were checked against float64 on a GPU (``benchmarks/verify_gpu.py``). All were compiled, and held
against the compiler faults that ``tests/kernels`` looks for in the machine code.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, Literal, Self, cast

import torch

from .availability import capability
from .spans import CutRule, power_of_2_from

Family = Literal["sm_80", "sm_90", "sm_100", "gfx942", "interpreter"]

FAMILIES: tuple[Family, ...] = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel's tiles; what a name means is said in the kernel's docstring."""

    block: int
    num_warps: int
    num_stages: int

    def fitted_to(self, width: int) -> int:
        """The block, narrowed to heads of ``width`` channels, but not below 64, from where the products are as fast."""
        return min(self.block, max(64, power_of_2_from(width)))


class _Row:
    """What the rows of both tables share: ``chunk_size``, ``fill``, tiles, and when sequences are cut."""

    USUAL_FILL: ClassVar[int]
    SHORTEST_SEGMENT: ClassVar[int]
    FEWEST_SEGMENTS: ClassVar[int]

    chunk_size: int
    fill: int

    @cached_property
    def cut_rule(self) -> CutRule:
        """Kept, since every call asks."""
        return CutRule(self.chunk_size, self.fill, self.SHORTEST_SEGMENT, self.FEWEST_SEGMENTS)

    @classmethod
    def uniform(cls, chunk_size: int, tiles: Tiles, *, fill: int | None = None) -> Self:
        """The same tiles for every kernel."""
        names = [field.name for field in fields(cls) if field.type is Tiles]  # type: ignore[arg-type]
        sizes = {"chunk_size": chunk_size, "fill": cls.USUAL_FILL if fill is None else fill}
        return cls(**sizes, **dict.fromkeys(names, tiles))


@dataclass(frozen=True)
class AdditiveConfig(_Row):
    """Tiles of every kernel of the additive family for one size of head.

    Attributes:
        chunk_size: tokens a chunk.
        walk: blocks over value_dim of the walk that makes outputs.
        saving: the same while it saves the state of every chunk, under a scalar gate.
        reverse: the same in the reverse walk.
        channel_walk: the same, all three, under a diagonal decay.
        summary: blocks over value_dim of the walk that makes states only.
        gradients: blocks over key_dim.
        channel_pairs: blocks over key_dim; diagonal decay.
        channel_gradients: blocks over key_dim; diagonal decay.
        fill: programs that keep the device busy; see ``CutRule``.
    """

    USUAL_FILL: ClassVar[int] = 256
    SHORTEST_SEGMENT: ClassVar[int] = 4
    FEWEST_SEGMENTS: ClassVar[int] = 2

    chunk_size: int
    walk: Tiles
    saving: Tiles
    reverse: Tiles
    channel_walk: Tiles
    summary: Tiles
    gradients: Tiles
    channel_pairs: Tiles
    channel_gradients: Tiles
    fill: int


@dataclass(frozen=True)
class DeltaConfig(_Row):
    """Tiles of every kernel of the delta family for one size of head.

    Attributes:
        chunk_size: micro-steps a chunk.
        products: blocks over key_dim of the products with the inverse; over value_dim of the gradients of pairs, and
            over key_dim there where a gate gets its gradient. See ``Tiles.fitted_to``.
        walk: blocks over value_dim of the walk that makes outputs.
        saving: the same while it saves what the gradients need.
        reverse: the same in the reverse walks.
        summary: blocks over value_dim of a walk that makes states only, and over key_dim of the maps beside it.
        outputs: blocks over value_dim of the outputs made from those states.
        gradients: blocks over key_dim.
        channel_pairs: blocks over key_dim; diagonal decay.
        channel_gradients: blocks over key_dim; diagonal decay.
        fill: programs that keep the device busy; see ``CutRule``.
        product_registers: the most that a thread takes in the kernel of the products, and in that of the gradients of
            pairs unless a gate gets its gradient; None for no limit.
    """

    USUAL_FILL: ClassVar[int] = 128
    SHORTEST_SEGMENT: ClassVar[int] = 8
    FEWEST_SEGMENTS: ClassVar[int] = 3

    chunk_size: int
    products: Tiles
    walk: Tiles
    saving: Tiles
    reverse: Tiles
    summary: Tiles
    outputs: Tiles
    gradients: Tiles
    channel_pairs: Tiles
    channel_gradients: Tiles
    fill: int
    product_registers: int | None = None


Config = AdditiveConfig | DeltaConfig


# The largest K of a row, then the row. The ptxas of Triton 3.6 can multiply a right operand narrower than 64 columns
# wrongly on Hopper, or read it from where nothing is (seen with blocks of 32): 16-bit rows pad smaller heads to 64.
_NVIDIA_16_BIT = {
    128: AdditiveConfig(
        chunk_size=64,
        walk=Tiles(64, 4, 2),
        saving=Tiles(64, 4, 1),
        reverse=Tiles(64, 4, 2),
        channel_walk=Tiles(64, 4, 3),
        summary=Tiles(64, 4, 3),
        gradients=Tiles(64, 4, 1),
        channel_pairs=Tiles(64, 4, 3),
        channel_gradients=Tiles(64, 4, 3),
        fill=256,
    ),
    256: replace(
        AdditiveConfig.uniform(64, Tiles(64, 8, 2)),
        gradients=Tiles(64, 4, 1),
        channel_pairs=Tiles(64, 4, 3),
        channel_gradients=Tiles(64, 4, 3),
    ),
    512: replace(
        AdditiveConfig.uniform(32, Tiles(64, 8, 1)),
        gradients=Tiles(64, 4, 1),
        channel_pairs=Tiles(64, 4, 1),
        channel_gradients=Tiles(64, 4, 1),
    ),
}
# Two loads in flight take more than its shared memory under Triton 3.4, which keeps copies of operands there.
_BLACKWELL_16_BIT = _NVIDIA_16_BIT | {
    256: replace(_NVIDIA_16_BIT[256], walk=Tiles(64, 8, 1), saving=Tiles(64, 8, 1), reverse=Tiles(64, 8, 1))
}
# 64 KB of shared memory: no loads in flight, and shorter chunks for wide heads.
_CDNA3_16_BIT = {
    128: AdditiveConfig.uniform(64, Tiles(64, 4, 1)),
    512: AdditiveConfig.uniform(32, Tiles(64, 8, 1)),
}
_FLOAT32 = {
    128: AdditiveConfig.uniform(32, Tiles(32, 4, 1)),
    512: AdditiveConfig.uniform(16, Tiles(16, 4, 1)),
}
_INTERPRETER = {512: AdditiveConfig.uniform(16, Tiles(16, 4, 1), fill=4)}


def additive_config(family: Family, key_dim: int, value_dim: int, dtype: torch.dtype) -> AdditiveConfig:
    """The row of the table for heads of this size; ``tuned`` puts a file's rows in front."""
    chosen = _overrides.get((AdditiveConfig, family, key_dim, value_dim, dtype))
    if chosen is not None:
        return cast(AdditiveConfig, chosen)
    if family == "interpreter":
        rows = _INTERPRETER
    elif dtype == torch.float32:
        rows = _FLOAT32
    else:
        rows = {"sm_100": _BLACKWELL_16_BIT, "gfx942": _CDNA3_16_BIT}.get(family, _NVIDIA_16_BIT)
    return next(row for largest, row in rows.items() if key_dim <= largest)


_DELTA_NVIDIA_16_BIT = {
    128: DeltaConfig(
        chunk_size=64,
        products=Tiles(128, 4, 1),
        walk=Tiles(64, 4, 1),
        saving=Tiles(64, 4, 1),
        reverse=Tiles(64, 4, 3),
        summary=Tiles(64, 4, 2),
        outputs=Tiles(64, 4, 1),
        gradients=Tiles(64, 4, 1),
        channel_pairs=Tiles(64, 4, 3),
        channel_gradients=Tiles(64, 4, 3),
        fill=256,
        product_registers=128,
    ),
    256: replace(
        DeltaConfig.uniform(64, Tiles(64, 8, 1)),
        products=Tiles(128, 4, 1),
        gradients=Tiles(64, 4, 1),
        channel_pairs=Tiles(64, 4, 3),
        channel_gradients=Tiles(64, 4, 3),
    ),
    512: replace(
        DeltaConfig.uniform(32, Tiles(64, 8, 1)),
        products=Tiles(32, 4, 1),  # no right operand is as narrow: the block is rows, or the axis that is summed
        gradients=Tiles(64, 4, 1),
        channel_pairs=Tiles(64, 4, 1),
        channel_gradients=Tiles(64, 4, 1),
    ),
}
# The limit of 64 columns is Hopper's. Ampere spills by thousands with the tiles of Hopper.
_DELTA_AMPERE_16_BIT = {
    128: DeltaConfig.uniform(64, Tiles(32, 8, 1), fill=256),
    256: DeltaConfig.uniform(64, Tiles(32, 8, 1)),
    512: DeltaConfig.uniform(32, Tiles(32, 8, 1)),
}
_DELTA_CDNA3_16_BIT = {
    128: DeltaConfig.uniform(64, Tiles(64, 4, 1)),
    512: DeltaConfig.uniform(32, Tiles(64, 8, 1)),
}
_DELTA_FLOAT32 = {
    128: DeltaConfig.uniform(32, Tiles(32, 4, 1)),
    512: DeltaConfig.uniform(16, Tiles(16, 4, 1)),
}
_DELTA_INTERPRETER = {512: DeltaConfig.uniform(32, Tiles(16, 4, 1), fill=16)}


def delta_config(family: Family, key_dim: int, value_dim: int, dtype: torch.dtype) -> DeltaConfig:
    """The row of the delta family's table for heads of this size; ``tuned`` puts a file's rows in front.

    Blocks count as heads: key_dim is that of one.
    """
    chosen = _overrides.get((DeltaConfig, family, key_dim, value_dim, dtype))
    if chosen is not None:
        return cast(DeltaConfig, chosen)
    if family == "interpreter":
        rows = _DELTA_INTERPRETER
    elif dtype == torch.float32:
        rows = _DELTA_FLOAT32
    else:
        rows = {"sm_80": _DELTA_AMPERE_16_BIT, "gfx942": _DELTA_CDNA3_16_BIT}.get(family, _DELTA_NVIDIA_16_BIT)
    return next(row for largest, row in rows.items() if key_dim <= largest)


_compiled_for: ContextVar[Family | None] = ContextVar("statemix_compiled_for", default=None)


@contextmanager
def compile_for(family: Family) -> Iterator[None]:
    """Choose tiles for a device that is not present, while launches are recorded."""
    token = _compiled_for.set(family)
    try:
        yield
    finally:
        _compiled_for.reset(token)


def device_family(device: torch.device) -> Family:
    """The family whose rows a device takes; a CPU is one only under Triton's interpreter."""
    given = _compiled_for.get()
    if given is not None:
        return given
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = capability(device)
    return "sm_80" if major == 8 else "sm_90" if major == 9 else "sm_100"


def products_in(dtype: torch.dtype, family: Family) -> str:
    """How float32 operands of a product are multiplied, in Triton's words.

    Where inputs have 16 bits they are intermediate results, and tf32 is finer than the inputs. For float32 inputs the
    product is to be one of float32: by three tf32 products, off by 2^-22, or by CDNA's matrix units, which have it.
    Tensor cores cut off what they add up, towards 0, which tells over a long chain: see ``ut_transform``.
    """
    if dtype != torch.float32:
        return "tf32"
    return "ieee" if family in ("gfx942", "interpreter") else "tf32x3"


@dataclass(frozen=True)
class TunedRow:
    """A configuration for one size of head on one family of devices, in place of the table's.

    Attributes:
        key_dim: K, of one block where a head has several.
    """

    family: Family
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    config: Config

    @property
    def key(self) -> tuple[type[Config], Family, int, int, torch.dtype]:
        """What it is for."""
        return type(self.config), self.family, self.key_dim, self.value_dim, self.dtype


# Not a context variable: autograd runs backward passes in threads of its own, which would not see one.
_overrides: dict[tuple[type[Config], Family, int, int, torch.dtype], Config] = {}


@contextmanager
def override(rows: Iterable[TunedRow]) -> Iterator[None]:
    """Inside, these rows stand in front of the table, in the whole process.

    The backward pass of a call belongs inside too: it reads states at the chunk borders of its forward pass.
    """
    before = dict(_overrides)
    _overrides.update({row.key: row.config for row in rows})
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def check_same_tiles(saved: tuple[int, ...], now: tuple[int, ...]) -> None:
    """What a forward pass saved lies in these chunks and segments; backward would read other ones as these.

    Raises:
        ValueError: other tiles have come in between.
    """
    if saved != now:
        raise ValueError(
            f"tiles: expected those of the forward pass, whose chunks and segments are {saved}, got others, with {now};"
            " run backward inside the same tuned() as forward"
        )


# (block, num_warps) worth a try: fewer warps spill, more leave a warp without work.
_TRIED_TILES = ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8))
_TRIED_STAGES = (1, 2, 3)
_TRIED_CHUNK_SIZES = (32, 64)
_TRIED_NUMBERS = {"fill": (128, 256, 512), "product_registers": (None, 128, 168)}


def candidates(present: TunedRow) -> list[Config]:
    """What tuning tries: the present row, then rows that differ from it in the tiles of one kernel or in one number.

    On Hopper no right operand of 16 bits is narrower than 64 columns: its default compiler can get those products
    wrong. Of the tiles only those of the products may be, whose block is never its columns.
    """
    on_hopper = present.family == "sm_90" and present.dtype != torch.float32
    widest = max(16, power_of_2_from(max(present.key_dim, present.value_dim)))
    tried = [present.config]
    for field in fields(present.config):
        before, others = getattr(present.config, field.name), list[Any]()
        least = 64 if on_hopper and field.name != "products" else 16
        if isinstance(before, Tiles):
            same = replace(before, block=min(before.block, widest))
            for (block, num_warps), stages in product(_TRIED_TILES, _TRIED_STAGES):
                if least <= block <= widest:
                    others.append(Tiles(block, num_warps, stages))
            others = [tiles for tiles in others if tiles != same]
        elif field.name == "chunk_size":
            others += [size for size in _TRIED_CHUNK_SIZES if size >= least]
        elif field.name != "product_registers" or present.family.startswith("sm_"):  # NVIDIA's compiler alone knows it
            others += _TRIED_NUMBERS[field.name]
        tried += [replace(present.config, **{field.name: other}) for other in others]
    return list(dict.fromkeys(tried))
