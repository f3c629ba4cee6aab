"""Tile sizes from a file that ``statemix bench --tune`` wrote.

    {"format": 2, "rows": [{"kernels": "additive", "arch": "sm_90", "key_dim": 128, "value_dim": 128,
                            "dtype": "bfloat16",
                            "config": {"chunk_size": 64, "scan": {"block": 64, "num_warps": 4, "num_stages": 2}, ...},
                            "measured": {...}}]}

``kernels`` is the family of kernels, additive or delta, whose configuration it is; ``key_dim`` is that of one block
where a head has several. ``measured`` says where the row comes from; it is for people and is not read. Words of files
from before 2026-12 are read as well.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch

from .availability import LARGEST_HEAD
from .launch_config import ARCHS, AdditiveConfig, Arch, Config, DeltaConfig, Tiles, TunedConfig, device_arch, override

FORMAT = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIGS: dict[str, type[Config]] = {"additive": AdditiveConfig, "delta": DeltaConfig}
_CHUNK_SIZES = {AdditiveConfig: (16, 32, 64, 128), DeltaConfig: (16, 32, 64)}  # the UT transform takes no larger ones
_ALLOWED: dict[str, Sequence[int]] = {
    "block": (16, 32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4, 5, 6),
    "max_registers": range(24, 256),  # what a compiler takes as a limit
}
_SIZES = range(1, LARGEST_HEAD + 1)
_FORMER = {
    "family": "arch",
    "walk": "scan",
    "channel_walk": "channel_scan",
    "channel_pairs": "channel_scores",
    "products": "intra_chunk",
    "product_registers": "max_registers",
}


@contextmanager
def tuned(path: str | Path) -> Iterator[None]:
    """Inside, the kernels take the tile sizes of a tuning file; heads of other sizes keep the table's.

    Backward passes belong inside with their forward passes, and so does the first call of what torch.compile made.

    >>> with tuned("h200.json"):  # doctest: +SKIP
    ...     loss = model(tokens)
    ...     loss.backward()

    Raises:
        ValueError: the file is no tuning file, or has nothing for this machine.
    """
    rows = load_tuning(path)
    here = device_arch(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    known = sorted({row.arch for row in rows})
    if here not in known:
        machine = "a machine without a GPU" if here == "interpreter" else here
        raise ValueError(
            f"{path}: expected rows for {machine}, got rows for {', '.join(known)}; leave the file out, or run "
            "statemix bench --tune on this GPU"
        )
    with override(rows):
        yield


def load_tuning(path: str | Path) -> list[TunedConfig]:
    """Read and check a tuning file.

    Raises:
        ValueError: names the place in the file that is wrong.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # not UTF-8 or not JSON, a key twice, or nested without end
        raise ValueError(f"{path}: expected JSON, got something else: {error}") from error
    whole = _mapping(content, str(path), ("format", "rows"))
    if type(whole["format"]) is not int or whole["format"] != FORMAT:
        raise ValueError(f"{path}: format: expected {FORMAT}, got {whole['format']!r}; tune again with this version")
    if not isinstance(whole["rows"], list) or not whole["rows"]:
        raise ValueError(f"{path}: rows: expected a list with one row or more, got {whole['rows']!r}")
    rows = [_row(row, f"{path}: rows[{index}]") for index, row in enumerate(whole["rows"])]
    for index, row in enumerate(rows):
        same = next(number for number, other in enumerate(rows) if other.key == row.key)
        if same != index:
            raise ValueError(
                f"{path}: rows[{index}]: expected other kernels, arch, sizes or dtype than in rows[{same}], got the"
                " same; leave one of the two out"
            )
    return rows


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys all differ: the last of two would win."""
    mapping = {_FORMER.get(key, key): value for key, value in pairs}
    if len(mapping) != len(pairs):
        raise ValueError(f"a key given twice among {', '.join(key for key, _ in pairs)}")
    return mapping


def _row(content: Any, place: str) -> TunedConfig:
    names = ("kernels", "arch", "key_dim", "value_dim", "dtype", "config")
    row = _mapping(content, place, names, optional=("measured",))
    archs = (*ARCHS, "interpreter")
    kernels = _one_of(row["kernels"], tuple(CONFIGS), f"{place}.kernels")
    arch = cast(Arch, _one_of(row["arch"], archs, f"{place}.arch"))
    config = _config(CONFIGS[kernels], row["config"], f"{place}.config")
    if arch == "gfx942" and isinstance(config, DeltaConfig) and config.max_registers is not None:
        limit = config.max_registers
        raise ValueError(f"{place}.config.max_registers: expected null on gfx942, which has no limit, got {limit}")
    return TunedConfig(
        arch,
        _one_of(row["key_dim"], _SIZES, f"{place}.key_dim"),
        _one_of(row["value_dim"], _SIZES, f"{place}.value_dim"),
        DTYPES[_one_of(row["dtype"], tuple(DTYPES), f"{place}.dtype")],
        config,
    )


def _config(kind: type[Config], content: Any, place: str) -> Config:
    """Every field of the configuration, and no other."""
    values_by_name = _mapping(content, place, tuple(field.name for field in fields(kind)))
    values: dict[str, Any] = {}
    for field in fields(kind):
        value, where = values_by_name[field.name], f"{place}.{field.name}"
        if field.type is Tiles:
            values[field.name] = _tiles(value, where)
        elif field.name == "chunk_size":
            values[field.name] = _one_of(value, _CHUNK_SIZES[kind], where)
        elif field.default is None and value is None:
            values[field.name] = None
        else:
            values[field.name] = _number(value, field.name, where)
    return kind(**values)


def _tiles(content: Any, place: str) -> Tiles:
    names = tuple(field.name for field in fields(Tiles))
    values_by_name = _mapping(content, place, names)
    return Tiles(**{name: _number(values_by_name[name], name, f"{place}.{name}") for name in names})


def _number(value: Any, name: str, place: str) -> int:
    if name in _ALLOWED:
        return int(_one_of(value, _ALLOWED[name], place))
    if type(value) is not int or value < 1:
        raise ValueError(f"{place}: expected a whole number from 1 up, got {value!r}")
    return value


def _one_of(value: Any, allowed: Sequence[Any], place: str) -> Any:
    if type(value) is not type(allowed[0]) or value not in allowed:
        expected = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else ", ".join(map(str, allowed))
        raise ValueError(f"{place}: expected one of {expected}, got {value!r}")
    return value


def _mapping(content: Any, place: str, names: Sequence[str], *, optional: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{place}: expected a mapping with {', '.join(names)}, got {content!r}")
    missing = [name for name in names if name not in content]
    unknown = [name for name in content if name not in (*names, *optional)]
    if missing or unknown:
        got = f"{', '.join(unknown)} besides" if unknown else f"no {', '.join(missing)}"
        raise ValueError(f"{place}: expected {', '.join(names)}, got {got}")
    return content
