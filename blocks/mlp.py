"""The perceptrons that a recipe can name: what each token goes through alone, [B, T, hidden_size] to the same.

A class is made as ``cls(config, hidden_size=...)``; ``reset_parameters(init_std=..., output_scale=...)`` draws all its
parameters anew, ``output_scale`` being for what makes the output.
"""

from typing import Annotated, Any

from statemix.plugins import PartConfig, Registry

MLPS: Registry[Any] = Registry("MLP", default="swiglu", methods=("reset_parameters",))
MLPSpec = Annotated[PartConfig, MLPS]


def build_mlp(config: PartConfig, *, hidden_size: int) -> Any:
    """The perceptron that ``config`` describes."""
    return MLPS.class_of(config)(config, hidden_size=hidden_size)
