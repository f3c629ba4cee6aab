"""What ``statemix bench`` does with its options: time named recurrences or those of a recipe."""

import argparse

from .bench import (
    CPU_SIZES,
    DTYPES,
    GPU_SIZES,
    bench,
    choose_device,
    header,
    named_subjects,
    printed,
    recipe_subjects,
    with_sizes,
)
from .ops import OPS, names_of
from .tune_command import run_tune

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
        return run_tune(arguments, sizes, dtype=dtype, device=device)
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
    for line in bench(subjects, device=device):
        print(printed(line), flush=True)


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Options that have no meaning together."""
    chosen = [name for name in ("op", *SIZES_OF_RECIPE) if getattr(arguments, name) is not None]
    if arguments.recipe is not None and (chosen or arguments.tune):
        option = chosen[0].replace("_", "-") if chosen else "tune"
        raise ValueError(f"--{option}: expected without a recipe, got both; a recipe names its own layers and sizes")
    if arguments.tune and (arguments.out is None or arguments.tuned is not None):
        raise ValueError("--tune: expected with --out FILE and without --tuned; FILE is where the tiles are written")
    if arguments.out is not None and not arguments.tune:
        raise ValueError("--out: expected beside --tune, which writes a file, got it alone")
