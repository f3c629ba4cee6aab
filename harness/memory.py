"""How a tensor lies in memory: other layouts of the same values, and new memory that is full of NaN."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def transposed(x: Tensor) -> Tensor:
    """The same values with the first two axes swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x


def every_second(x: Tensor) -> Tensor:
    """The same values as every second entry of the last axis of a wider tensor whose other entries are NaN."""
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]


@contextmanager
def new_memory(*, is_nan: bool) -> Iterator[None]:
    """torch.empty and its like return memory full of NaN, or as it is. Either way torch runs the same algorithms."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = is_nan
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
