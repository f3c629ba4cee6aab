"""What ``statemix bench`` does with its options: time named recurrences or those of a recipe, or tune the kernels."""

import argparse

import torch

from statemix.kernels.availability import LARGEST_HEAD

from .bench import (
    CPU_SIZES,
    DTYPES,
    GPU_SIZES,
    bench,
    choose_device,
    header,
    line,
    named_subjects,
    recipe_subjects,
    with_sizes,
)
from .ops import OPS, Sizes, find_ops, names_of

# Timed where --op names none: one for each kind of decay. Their row serves the others too, which are only checked.
STAND_FOR_DELTA = ("deltanet", "gated_deltanet", "kda")
SIZES_OF_RECIPE = ("num_heads", "num_value_heads", "key_dim", "value_dim")


def run_bench(arguments: argparse.Namespace) -> None:
    """Print the table, or with ``--tune`` write the file.

    Raises:
        ValueError: names the option that cannot be met.
    """
    _refuse_contradictions(arguments)
    device = choose_device(arguments.device)
    on_gpu = device.type == "cuda"
    dtype = DTYPES[arguments.dtype or ("bfloat16" if on_gpu else "float32")]
    sizes = with_sizes(GPU_SIZES if on_gpu else CPU_SIZES, arguments)
    if arguments.tune:
        return _tune(arguments, sizes, dtype=dtype, device=device)
    if arguments.recipe is None:
        fitting = [name for name in names_of("all") if sizes.key_dim % OPS[name].blocks == 0]
        subjects = named_subjects(arguments.op or fitting, sizes, dtype=dtype, device=device)
    else:
        from statemix.recipes import load

        recipe = load(
            arguments.recipe, arguments.overrides, plugins=arguments.plugin, trust_plugins=arguments.trust_plugins
        )
        batch, seq_len = arguments.batch, arguments.seq_len
        subjects = recipe_subjects(recipe, batch=batch, seq_len=seq_len, dtype=dtype, device=device)
    print(header(device, dtype), flush=True)
    for row in bench(subjects, device=device):
        print(line(row), flush=True)


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Options that have no meaning together."""
    given = [name for name in ("op", *SIZES_OF_RECIPE) if getattr(arguments, name) is not None]
    if arguments.recipe is not None and (given or arguments.tune):
        option = given[0].replace("_", "-") if given else "tune"
        raise ValueError(f"--{option}: expected without a recipe, got both; a recipe names its own layers and sizes")
    if arguments.tune and (arguments.out is None or arguments.tuned is not None):
        raise ValueError("--tune: expected with --out FILE and without --tuned; FILE is where the tiles are written")
    if arguments.out is not None and not arguments.tune:
        raise ValueError("--out: expected beside --tune, which writes a file, got it alone")


def _tune(arguments: argparse.Namespace, sizes: Sizes, *, dtype: torch.dtype, device: torch.device) -> None:
    from statemix.kernels.tuning_file import save_tuning

    from .tuning import tune

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
        tuned = tune(sizes, dtype=dtype, ops=names, device=device, show=lambda text: print(text, flush=True))
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
