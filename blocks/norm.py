"""The norms that a recipe can name for its residual stream, over the last axis of [B, T, hidden_size].

A class is made as ``cls(hidden_size, eps=..., option=...)`` with the options of its Config; ``reset_parameters()``
draws all its parameters anew.
"""

from typing import Annotated, Any

from statemix.mixers import RMSNorm
from statemix.plugins import PartConfig, Registry

NORMS: Registry[Any] = Registry("norm", takes_name=True, methods=("reset_parameters",))
NORMS.register(RMSNorm)
NormSpec = Annotated[PartConfig, NORMS]


def build_norm(config: PartConfig, size: int, *, eps: float) -> Any:
    """The norm that ``config`` describes, for ``size`` channels."""
    return NORMS.class_of(config)(size, eps=eps, **config.model_dump(exclude={"type"}))
