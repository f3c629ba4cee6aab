"""Tile sizes of the kernels: one short table, keyed by architecture, head sizes and element size.

Never keyed by the sequence length or the batch: a training run on packed documents must not compile anew every step.
Those for Hopper were checked against float64 on a GPU (``benchmarks/verify_gpu.py``). All were compiled, and held
against the compiler faults that ``tests/kernels`` looks for in the machine code.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, cast

import torch

from .availability import capability
from .spans import PartitionRule, power_of_2_from

Arch = Literal["sm_80", "sm_90", "sm_100", "gfx942", "interpreter"]

ARCHS: tuple[Arch, ...] = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Tiles:
    """Sizes of one kernel's tiles; what a name means is said in the kernel's docstring."""

    block: int
    num_warps: int
    num_stages: int

    def fitted_to(self, width: int) -> int:
        """The block, narrowed to heads of ``width`` channels, but not below 64, from where the products are as fast."""
        return min(self.block, max(64, power_of_2_from(width)))


class _Tiling:
    """What configs of both families share: ``chunk_size``, ``fill``, tiles, and when sequences are split."""

    USUAL_FILL: ClassVar[int]
    SHORTEST_SEGMENT: ClassVar[int]
    FEWEST_SEGMENTS: ClassVar[int]

    chunk_size: int
    fill: int

    @cached_property
    def partition_rule(self) -> PartitionRule:
        """Kept, since every call asks."""
        return PartitionRule(self.chunk_size, self.fill, self.SHORTEST_SEGMENT, self.FEWEST_SEGMENTS)

    @classmethod
    def uniform(cls, chunk_size: int, tiles: Tiles, *, fill: int | None = None) -> Self:
        """The same tiles for every kernel."""
        names = [field.name for field in fields(cls) if field.type is Tiles]  # type: ignore[arg-type]
        sizes = {"chunk_size": chunk_size, "fill": cls.USUAL_FILL if fill is None else fill}
        return cls(**sizes, **dict.fromkeys(names, tiles))


@dataclass(frozen=True)
class AdditiveConfig(_Tiling):
    """Tiles of every kernel of the additive family for one size of head.

    Attributes:
        chunk_size: tokens a chunk.
        scan: blocks over value_dim of the inter-chunk scan that makes outputs.
        saving: the same while it saves the state of every chunk, under a scalar gate.
        reverse: the same in the reverse scan.
        channel_scan: the same, all three, under a diagonal decay.
        summary: blocks over value_dim of the scan that makes states only.
        gradients: blocks over key_dim.
        channel_scores: blocks over key_dim; diagonal decay.
        channel_gradients: blocks over key_dim; diagonal decay.
        fill: programs that keep the device busy; see ``PartitionRule``.
    """

    USUAL_FILL: ClassVar[int] = 256
    SHORTEST_SEGMENT: ClassVar[int] = 4
    FEWEST_SEGMENTS: ClassVar[int] = 2

    chunk_size: int
    scan: Tiles
    saving: Tiles
    reverse: Tiles
    channel_scan: Tiles
    summary: Tiles
    gradients: Tiles
    channel_scores: Tiles
    channel_gradients: Tiles
    fill: int


@dataclass(frozen=True)
class DeltaConfig(_Tiling):
    """Tiles of every kernel of the delta family for one size of head.

    Attributes:
        chunk_size: micro-steps a chunk.
        intra_chunk: blocks over key_dim of the UT transform; over value_dim of the gradients of scores, and over
            key_dim there where a gate gets its gradient. See ``Tiles.fitted_to``.
        scan: blocks over value_dim of the inter-chunk scan that makes outputs.
        saving: the same while it saves what the gradients need.
        reverse: the same in the reverse scans.
        summary: blocks over value_dim of a scan that makes states only, and over key_dim of the maps beside it.
        outputs: blocks over value_dim of the outputs made from those states.
        gradients: blocks over key_dim.
        channel_scores: blocks over key_dim; diagonal decay.
        channel_gradients: blocks over key_dim; diagonal decay.
        fill: programs that keep the device busy; see ``PartitionRule``.
        max_registers: the most that a thread takes in the UT transform, and in the gradients of scores unless a gate
            gets its gradient; None for no limit.
    """

    USUAL_FILL: ClassVar[int] = 128
    SHORTEST_SEGMENT: ClassVar[int] = 8
    FEWEST_SEGMENTS: ClassVar[int] = 3

    chunk_size: int
    intra_chunk: Tiles
    scan: Tiles
    saving: Tiles
    reverse: Tiles
    summary: Tiles
    outputs: Tiles
    gradients: Tiles
    channel_scores: Tiles
    channel_gradients: Tiles
    fill: int
    max_registers: int | None = None


Config = AdditiveConfig | DeltaConfig


# Kernels whose blocks are over the key, where heads are wide.
_WIDE: dict[str, Any] = {
    "gradients": Tiles(64, 4, 1),
    "channel_scores": Tiles(64, 4, 3),
    "channel_gradients": Tiles(64, 4, 3),
}
_WIDEST: dict[str, Any] = dict.fromkeys(_WIDE, Tiles(64, 4, 1))

# The largest K of a config, then the config. The ptxas of Triton 3.6 can multiply a right operand narrower than 64
# columns wrongly on Hopper, or read it from where nothing is (seen with blocks of 32): 16-bit configs pad smaller heads
# to 64.
_NVIDIA_16_BIT = {
    128: AdditiveConfig(
        chunk_size=64,
        scan=Tiles(64, 4, 2),
        saving=Tiles(64, 4, 1),
        reverse=Tiles(64, 4, 2),
        channel_scan=Tiles(64, 4, 3),
        summary=Tiles(64, 4, 3),
        gradients=Tiles(64, 4, 1),
        channel_scores=Tiles(64, 4, 3),
        channel_gradients=Tiles(64, 4, 3),
        fill=256,
    ),
    256: replace(AdditiveConfig.uniform(64, Tiles(64, 8, 2)), **_WIDE),
    512: replace(AdditiveConfig.uniform(32, Tiles(64, 8, 1)), **_WIDEST),
}
# Two loads in flight take more than its shared memory under Triton 3.4, which keeps copies of operands there.
_BLACKWELL_16_BIT = _NVIDIA_16_BIT | {
    256: replace(_NVIDIA_16_BIT[256], scan=Tiles(64, 8, 1), saving=Tiles(64, 8, 1), reverse=Tiles(64, 8, 1))
}
# 64 KB of shared memory: no loads in flight, and shorter chunks for wide heads.
_CDNA3_16_BIT = {128: AdditiveConfig.uniform(64, Tiles(64, 4, 1)), 512: AdditiveConfig.uniform(32, Tiles(64, 8, 1))}
_FLOAT32 = {128: AdditiveConfig.uniform(32, Tiles(32, 4, 1)), 512: AdditiveConfig.uniform(16, Tiles(16, 4, 1))}
_INTERPRETER = {512: AdditiveConfig.uniform(16, Tiles(16, 4, 1), fill=4)}


_DELTA_NVIDIA_16_BIT = {
    128: DeltaConfig(
        chunk_size=64,
        intra_chunk=Tiles(128, 4, 1),
        scan=Tiles(64, 4, 1),
        saving=Tiles(64, 4, 1),
        reverse=Tiles(64, 4, 3),
        summary=Tiles(64, 4, 2),
        outputs=Tiles(64, 4, 1),
        gradients=Tiles(64, 4, 1),
        channel_scores=Tiles(64, 4, 3),
        channel_gradients=Tiles(64, 4, 3),
        fill=256,
        max_registers=128,
    ),
    256: replace(DeltaConfig.uniform(64, Tiles(64, 8, 1)), intra_chunk=Tiles(128, 4, 1), **_WIDE),
    # no right operand is as narrow as 32: the block is of rows, or of the axis that is summed
    512: replace(DeltaConfig.uniform(32, Tiles(64, 8, 1)), intra_chunk=Tiles(32, 4, 1), **_WIDEST),
}
# The limit of 64 columns is Hopper's. Ampere spills by thousands with the tiles of Hopper.
_DELTA_AMPERE_16_BIT = {
    128: DeltaConfig.uniform(64, Tiles(32, 8, 1), fill=256),
    256: DeltaConfig.uniform(64, Tiles(32, 8, 1)),
    512: DeltaConfig.uniform(32, Tiles(32, 8, 1)),
}
_DELTA_CDNA3_16_BIT = {128: DeltaConfig.uniform(64, Tiles(64, 4, 1)), 512: DeltaConfig.uniform(32, Tiles(64, 8, 1))}
_DELTA_FLOAT32 = {128: DeltaConfig.uniform(32, Tiles(32, 4, 1)), 512: DeltaConfig.uniform(16, Tiles(16, 4, 1))}
_DELTA_INTERPRETER = {512: DeltaConfig.uniform(32, Tiles(16, 4, 1), fill=16)}


_TABLES: dict[type[Config], dict[str, Mapping[int, Config]]] = {
    AdditiveConfig: {
        "interpreter": _INTERPRETER,
        "float32": _FLOAT32,
        "sm_100": _BLACKWELL_16_BIT,
        "gfx942": _CDNA3_16_BIT,
        "others": _NVIDIA_16_BIT,
    },
    DeltaConfig: {
        "interpreter": _DELTA_INTERPRETER,
        "float32": _DELTA_FLOAT32,
        "sm_80": _DELTA_AMPERE_16_BIT,
        "gfx942": _DELTA_CDNA3_16_BIT,
        "others": _DELTA_NVIDIA_16_BIT,
    },
}


def additive_config(arch: Arch, key_dim: int, value_dim: int, dtype: torch.dtype) -> AdditiveConfig:
    """The config of the table for heads of this size; ``tuned`` puts those of a file in front."""
    return cast(AdditiveConfig, _config(AdditiveConfig, arch, key_dim, value_dim, dtype))


def delta_config(arch: Arch, key_dim: int, value_dim: int, dtype: torch.dtype) -> DeltaConfig:
    """The config of the delta family for heads of this size; ``tuned`` puts those of a file in front.

    Blocks count as heads: key_dim is that of one.
    """
    return cast(DeltaConfig, _config(DeltaConfig, arch, key_dim, value_dim, dtype))


def _config(kind: type[Config], arch: Arch, key_dim: int, value_dim: int, dtype: torch.dtype) -> Config:
    tuned = _overrides.get((kind, arch, key_dim, value_dim, dtype))
    if tuned is not None:
        return tuned
    tables = _TABLES[kind]
    name = "float32" if dtype == torch.float32 and arch != "interpreter" else arch
    table = tables.get(name, tables["others"])
    return next(config for largest, config in table.items() if key_dim <= largest)


_compiled_for: ContextVar[Arch | None] = ContextVar("statemix_compiled_for", default=None)


@contextmanager
def compile_for(arch: Arch) -> Iterator[None]:
    """Choose tiles for a device that is not present, while launches are recorded."""
    token = _compiled_for.set(arch)
    try:
        yield
    finally:
        _compiled_for.reset(token)


def device_arch(device: torch.device) -> Arch:
    """The architecture whose configs a device takes; a CPU is one only under Triton's interpreter."""
    arch = _compiled_for.get()
    if arch is not None:
        return arch
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = capability(device)
    return "sm_80" if major == 8 else "sm_90" if major == 9 else "sm_100"


def products_in(dtype: torch.dtype, arch: Arch) -> str:
    """How float32 operands of a product are multiplied, in Triton's words.

    Where inputs have 16 bits they are intermediate results, and tf32 is finer than the inputs. For float32 inputs the
    product is to be one of float32: by three tf32 products, off by 2^-22, or by CDNA's matrix units, which have it.
    Tensor cores cut off what they add up, towards 0, which tells over a long chain: see ``ut_transform``.
    """
    if dtype != torch.float32:
        return "tf32"
    return "ieee" if arch in ("gfx942", "interpreter") else "tf32x3"


@dataclass(frozen=True)
class TunedConfig:
    """A configuration for one size of head on one architecture, in place of the table's.

    Attributes:
        key_dim: K, of one block where a head has several.
    """

    arch: Arch
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    config: Config

    @property
    def key(self) -> tuple[type[Config], Arch, int, int, torch.dtype]:
        """What it is for."""
        return type(self.config), self.arch, self.key_dim, self.value_dim, self.dtype


# Not a context variable: autograd runs backward passes in threads of its own, which would not see one.
_overrides: dict[tuple[type[Config], Arch, int, int, torch.dtype], Config] = {}


@contextmanager
def override(configs: Iterable[TunedConfig]) -> Iterator[None]:
    """Inside, these configs stand in front of the table, in the whole process.

    The backward pass of a call belongs inside too: it reads states at the chunk borders of its forward pass.
    """
    before = dict(_overrides)
    _overrides.update({tuned.key: tuned.config for tuned in configs})
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
