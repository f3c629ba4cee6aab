"""What ``statemix bench --tune`` does with its options: tune the kernels and write the file that ``--tuned`` reads."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from statemix.kernels.availability import LARGEST_HEAD
from statemix.kernels.launch_config import TunedConfig
from statemix.kernels.tuning_file import CONFIGS, FORMAT

from . import tuning
from .ops import Sizes, find_ops, names_of

# Timed where --op names none: one for each kind of decay. Their tiles serve the others too, which are only checked.
STAND_FOR_DELTA = ("deltanet", "gated_deltanet", "kda")


def run_tune(arguments: argparse.Namespace, sizes: Sizes, *, dtype: torch.dtype, device: torch.device) -> None:
    """Choose tiles for every family of kernels asked for, and write each into the file as it comes.

    Raises:
        ValueError: names the option that cannot be met.
    """
    out = arguments.out
    if not out.parent.is_dir():
        raise ValueError(f"--out: expected a file in a folder that exists, got {str(out)!r}; make {out.parent} first")
    if out.is_dir():
        raise ValueError(f"--out: expected a file, got the folder {str(out)!r}; name a file in it")
    together = _tuned_together(arguments.op, sizes.key_dim)
    if sizes.value_dim > LARGEST_HEAD:
        raise ValueError(f"--value-dim: expected at most {LARGEST_HEAD}, as the kernels take, got {sizes.value_dim}")
    rows = []
    for names in together:
        tuned = tuning.tune(sizes, dtype=dtype, ops=names, device=device, show=lambda text: print(text, flush=True))
        rows.append((tuned.row, tuned.measured))
        save_tuning(out, rows)  # each as it comes: what follows may fail, or be interrupted
        gain = f"{1 / tuned.score:.2f} times as fast as" if tuned.score < 1 else "none is faster than"
        print(f"{', '.join(names)}: {gain} the present tiles on the mean", flush=True)
    print(f"written to {out}, for statemix train or bench --tuned {out}")


def _tuned_together(names: list[str] | None, key_dim: int) -> list[list[str]]:
    """The recurrences that share a row of tiles: those of one family of kernels, with as many blocks."""
    chosen = find_ops(list(dict.fromkeys(names or [*names_of("additive"), *STAND_FOR_DELTA])))
    for op in chosen:
        if key_dim % op.blocks:
            raise ValueError(
                f"--key-dim: expected a multiple of the {op.blocks} blocks of {op.name}, got {key_dim}; choose another,"
                f" or leave {op.name} out of --op"
            )
        if key_dim // op.blocks > LARGEST_HEAD:
            most = LARGEST_HEAD * op.blocks
            raise ValueError(f"--key-dim: expected at most {most} for {op.name}, as the kernels take, got {key_dim}")
    kinds = dict.fromkeys((op.kernels, op.blocks) for op in chosen)
    return [[op.name for op in chosen if (op.kernels, op.blocks) == kind] for kind in kinds]


def save_tuning(path: str | Path, rows: Sequence[tuple[TunedConfig, Mapping[str, Any]]]) -> None:
    """Write rows, each with what was measured."""
    written = [
        {
            "kernels": next(name for name, config in CONFIGS.items() if type(row.config) is config),
            "arch": row.arch,
            "key_dim": row.key_dim,
            "value_dim": row.value_dim,
            "dtype": str(row.dtype).removeprefix("torch."),
            "config": asdict(row.config),
            "measured": dict(measured),
        }
        for row, measured in rows
    ]
    Path(path).write_text(json.dumps({"format": FORMAT, "rows": written}, indent=2) + "\n", encoding="utf-8")
