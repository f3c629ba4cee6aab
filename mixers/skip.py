"""The skip of Mamba-2: D v_t is added to the read-out, D one number a value head.

Shapes: B batch, T time, HV value heads, V value_dim.
Source: arXiv:2405.21060 section 7.
"""

from torch import Tensor

from .packing import without_rest


def add_skip(mixed: Tensor, value: Tensor, scale: Tensor | None, *, cu_seqlens: Tensor | None) -> Tensor:
    """``mixed`` + D v, both [B, T, HV, V], D [HV]; a mixer without skip has no D, and 0 after the last document."""
    if scale is None:
        return mixed
    return mixed + scale.to(mixed.dtype)[:, None] * without_rest(value, cu_seqlens)
