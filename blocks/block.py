"""The pre-norm residual block: x <- x + mixer(norm(x)), then x <- x + mlp(norm(x))."""

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from statemix.mixers import MixerSpec, MixerState, RMSNorm, build_mixer
from statemix.plugins import PartConfig

from .mlp import MLPSpec, build_mlp
from .norm import build_norm

_RMS = RMSNorm.Config()


class Block(nn.Module):
    """One layer: a sequence mixer and, unless its config has none, a perceptron."""

    class Config(BaseModel):
        model_config = ConfigDict(frozen=True, extra="forbid")

        mixer: MixerSpec = Field(description="how tokens see each other")
        mlp: MLPSpec | None = Field(None, description="what each token goes through alone; null means nothing")

    def __init__(self, config: Config, *, hidden_size: int, norm_eps: float = 1e-5, norm: PartConfig = _RMS) -> None:
        super().__init__()
        self.mixer_norm = build_norm(norm, hidden_size, eps=norm_eps)
        self.mixer = build_mixer(config.mixer, hidden_size=hidden_size, norm_eps=norm_eps)
        self.mlp = None
        if config.mlp is not None:
            self.mlp_norm = build_norm(norm, hidden_size, eps=norm_eps)
            self.mlp = build_mlp(config.mlp, hidden_size=hidden_size)

    def reset_parameters(self, *, init_std: float = 0.02, output_scale: float = 1.0) -> None:
        """Draw all parameters anew; ``output_scale`` multiplies what adds to the residual stream."""
        self.mixer_norm.reset_parameters()
        self.mixer.reset_parameters(init_std=init_std, output_scale=output_scale)
        if self.mlp is not None:
            self.mlp_norm.reset_parameters()
            self.mlp.reset_parameters(init_std=init_std, output_scale=output_scale)

    def forward(
        self, hidden: Tensor, state: MixerState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MixerState]:
        """One layer on ``hidden`` [B, T, hidden_size]; state and cu_seqlens are the mixer's."""
        mixed, state = self.mixer(self.mixer_norm(hidden), state, cu_seqlens=cu_seqlens)
        hidden = hidden + mixed
        if self.mlp is not None:
            hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return hidden, state
