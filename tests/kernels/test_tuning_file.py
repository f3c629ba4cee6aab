"""Tuning files: what is written is read back, what is wrong is named, and rows in use count in every thread."""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from statemix.benchmarks.candidates import candidates
from statemix.benchmarks.tune_command import save_tuning
from statemix.kernels import tuned, tuning_file
from statemix.kernels.launch_config import (
    ARCHS,
    Arch,
    Config,
    Tiles,
    TunedConfig,
    additive_config,
    delta_config,
    override,
)
from statemix.kernels.tuning_file import load_tuning

SIZES = ((16, 16), (24, 40), (64, 64), (128, 128), (256, 64), (512, 512))


def a_row(arch: Arch = "interpreter") -> TunedConfig:
    config = additive_config(arch, 16, 20, torch.float32)
    return TunedConfig(arch, 16, 20, torch.float32, replace(config, chunk_size=32, scan=Tiles(32, 8, 2)))


def a_delta_row(arch: Arch = "interpreter") -> TunedConfig:
    config = delta_config(arch, 16, 20, torch.float32)
    return TunedConfig(arch, 16, 20, torch.float32, replace(config, chunk_size=16, scan=Tiles(32, 8, 2)))


@pytest.mark.parametrize("registers", [None, 128])
def test_what_is_written_is_read_back(tmp_path: Path, registers: int | None) -> None:
    delta = a_delta_row()
    delta = replace(delta, config=replace(delta.config, max_registers=registers))
    rows = [a_row(), replace(a_row("sm_90"), dtype=torch.bfloat16), delta]
    save_tuning(tmp_path / "t.json", [(row, {"gpu": "a name"}) for row in rows])
    assert load_tuning(tmp_path / "t.json") == rows


def test_a_file_with_the_former_words_is_read(tmp_path: Path) -> None:
    save_tuning(tmp_path / "t.json", [(a_row(), {}), (a_delta_row(), {})])
    text = (tmp_path / "t.json").read_text()
    for former, word in tuning_file._FORMER.items():
        text = text.replace(f'"{word}"', f'"{former}"')
    assert '"walk"' in text and '"family"' in text
    (tmp_path / "former.json").write_text(text)
    assert load_tuning(tmp_path / "former.json") == [a_row(), a_delta_row()]


def change(path: str, value: Any) -> Callable[[Any], None]:
    """Sets the value at a path such as ``rows.0.arch``; a value of None deletes it."""

    def apply(content: Any) -> None:
        *way, last = path.split(".")
        for step in way:
            content = content[int(step) if step.isdecimal() else step]
        if value is None:
            del content[last]
        else:
            content[last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("format", 1, "format: expected 2, got 1; tune again"),
        ("format", 2.0, "format: expected 2, got 2.0"),
        ("rows", [], "rows: expected a list"),
        ("rows.0.arch", "sm_75", "rows[0].arch: expected one of sm_80"),
        ("rows.0.dtype", "float64", "rows[0].dtype: expected one of float32"),
        ("rows.0.key_dim", 0, "rows[0].key_dim: expected one of 1 to 512, got 0"),
        ("rows.0.key_dim", True, "rows[0].key_dim"),
        ("rows.0.config.chunk_size", 48, "config.chunk_size: expected one of 16, 32, 64, 128, got 48"),
        ("rows.0.config.scan.num_warps", 3, "config.scan.num_warps"),
        ("rows.0.config.scan.num_warp", 4, "num_warp besides"),
        ("rows.0.config.scan", 64, "config.scan: expected a mapping"),
        ("rows.0.config.fill", -1, "config.fill"),
        ("rows.0.config.summary", None, "no summary"),
        ("rows.0.confg", {}, "confg besides"),
        ("rows.0.kernels", None, "no kernels"),
        ("rows.0.kernels", "delta", "config: expected chunk_size, intra_chunk"),
        ("rows.1.kernels", "deltas", "rows[1].kernels: expected one of additive, delta, got 'deltas'"),
        ("rows.1.config.chunk_size", 128, "rows[1].config.chunk_size: expected one of 16, 32, 64, got 128"),
        ("rows.1.config.max_registers", 256, "max_registers: expected one of 24 to 255, got 256"),
        ("rows.1.config.fill", 0, "rows[1].config.fill"),
        ("rows.1.arch", "gfx942", "rows[1].config.max_registers: expected null on gfx942"),
        (
            "rows.2.dtype",
            "float32",
            "rows[2]: expected other kernels, arch, sizes or dtype than in rows[0], got the same",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, path: str, value: Any, named: str) -> None:
    file = tmp_path / "t.json"
    limited = replace(a_delta_row(), config=replace(a_delta_row().config, max_registers=128))
    save_tuning(file, [(a_row(), {}), (limited, {}), (replace(a_row(), dtype=torch.float16), {})])
    content = json.loads(file.read_text())
    change(path, value)(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(named)) as refused:
        load_tuning(file)
    assert str(refused.value).startswith(str(file))


@pytest.mark.parametrize("text", [b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"format": 2, "format": 2}'])
def test_a_file_that_is_no_tuning_file_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "t.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"t\.json: expected"):
        load_tuning(tmp_path / "t.json")


@pytest.mark.parametrize(("row", "row_of"), [(a_row(), additive_config), (a_delta_row(), delta_config)])
def test_rows_stand_in_front_of_the_table_in_every_thread_and_only_inside(
    tmp_path: Path, row: TunedConfig, row_of: Callable[..., Config]
) -> None:
    save_tuning(tmp_path / "t.json", [(row, {})])
    other_of = delta_config if row_of is additive_config else additive_config

    def present() -> Config:
        return row_of(row.arch, row.key_dim, row.value_dim, row.dtype)

    seen: list[Config] = []
    before = present()
    with tuned(tmp_path / "t.json") if not torch.cuda.is_available() else override([row]):
        thread = threading.Thread(target=lambda: seen.append(present()))  # as autograd runs backward passes
        thread.start()
        thread.join()
        assert present() == row.config
        assert row_of(row.arch, 16, 16, row.dtype) == before  # another head size
        assert type(other_of(row.arch, row.key_dim, row.value_dim, row.dtype)) is not type(row.config)
    assert seen == [row.config] and present() == before != row.config


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_file_for_other_devices_is_refused(tmp_path: Path) -> None:
    save_tuning(tmp_path / "t.json", [(a_row("sm_90"), {})])
    with pytest.raises(ValueError, match="expected rows for a machine without a GPU, got rows for sm_90"):
        with tuned(tmp_path / "t.json"):
            pass


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row_of", [additive_config, delta_config])
def test_candidates_begin_with_the_present_row_and_differ_from_it_in_one_field(
    arch: Arch, dtype: torch.dtype, row_of: Callable[..., Config]
) -> None:
    for key_dim, value_dim in SIZES:
        given = row_of(arch, key_dim, value_dim, dtype)
        present, *others = candidates(TunedConfig(arch, key_dim, value_dim, dtype, given))
        assert present == given
        assert len(set(others)) == len(others)
        varied = set[str]()
        for other in others:
            [changed] = [f.name for f in fields(other) if getattr(other, f.name) != getattr(present, f.name)]
            varied.add(changed)
            tiles = getattr(other, changed)
            columns = tiles.block if isinstance(tiles, Tiles) else tiles if changed == "chunk_size" else 64
            if arch == "sm_90" and dtype == torch.bfloat16 and changed != "intra_chunk":
                assert columns >= 64, "narrower products have been compiled wrongly on Hopper"
        without_room = {"max_registers"} if arch == "gfx942" else set()  # AMD's compiler knows no such limit
        without_room |= {"chunk_size"} if arch == "sm_90" and given.chunk_size == 64 else set()
        if min(key_dim, value_dim) >= 64:  # no block is as narrow as smaller heads where 64 columns are the least
            assert varied == {field.name for field in fields(given)} - without_room
