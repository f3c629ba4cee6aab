"""The tiles that tuning tries beside the present ones."""

from dataclasses import fields, replace
from itertools import product
from typing import Any

import torch

from statemix.kernels.launch_config import Config, Tiles, TunedConfig
from statemix.kernels.spans import power_of_2_from

# (block, num_warps) worth a try: fewer warps spill, more leave a warp without work.
_TRIED_TILES = ((32, 4), (64, 4), (64, 8), (128, 4), (128, 8))
_TRIED_STAGES = (1, 2, 3)
_TRIED_CHUNK_SIZES = (32, 64)
_TRIED_NUMBERS = {"fill": (128, 256, 512), "max_registers": (None, 128, 168)}


def candidates(present: TunedConfig) -> list[Config]:
    """What tuning tries: the present config, then others that differ in the tiles of one kernel or in one number.

    On Hopper no right operand of 16 bits is narrower than 64 columns: its default compiler can get those products
    wrong. Of the tiles only those of intra-chunk kernels may be, whose block is never its columns.
    """
    on_hopper = present.arch == "sm_90" and present.dtype != torch.float32
    widest = max(16, power_of_2_from(max(present.key_dim, present.value_dim)))
    tried = [present.config]
    for field in fields(present.config):
        before, others = getattr(present.config, field.name), list[Any]()
        least = 64 if on_hopper and field.name != "intra_chunk" else 16
        if isinstance(before, Tiles):
            same = replace(before, block=min(before.block, widest))
            for (block, num_warps), stages in product(_TRIED_TILES, _TRIED_STAGES):
                if least <= block <= widest:
                    others.append(Tiles(block, num_warps, stages))
            others = [tiles for tiles in others if tiles != same]
        elif field.name == "chunk_size":
            others += [size for size in _TRIED_CHUNK_SIZES if size >= least]
        elif field.name != "max_registers" or present.arch.startswith("sm_"):  # NVIDIA's compiler alone knows it
            others += _TRIED_NUMBERS[field.name]
        tried += [replace(present.config, **{field.name: other}) for other in others]
    return list(dict.fromkeys(tried))
