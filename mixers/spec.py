"""Which mixers there are, and how one is built from its config."""

from typing import Annotated

from pydantic import Field

from .attention import Attention
from .state_mixer import StateMixer

MixerSpec = Annotated[StateMixer.Config | Attention.Config, Field(discriminator="type")]


def build_mixer(
    config: StateMixer.Config | Attention.Config, *, hidden_size: int, norm_eps: float = 1e-5
) -> StateMixer | Attention:
    """The mixer that ``config`` describes, for hidden states of ``hidden_size`` channels."""
    if isinstance(config, Attention.Config):
        return Attention(config, hidden_size=hidden_size, norm_eps=norm_eps)
    return StateMixer(config, hidden_size=hidden_size, norm_eps=norm_eps)
