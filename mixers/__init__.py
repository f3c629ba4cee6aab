"""Sequence mixers: the recurrence with any transition, and softmax attention."""

from .attention import Attention
from .capabilities import Capabilities
from .convolution import ShortConvolution
from .rms_norm import RMSNorm
from .spec import MixerSpec, build_mixer
from .state import AttentionState, MixerState, StateError, StateMixerState
from .state_mixer import StateMixer

__all__ = [
    "Attention",
    "AttentionState",
    "Capabilities",
    "MixerSpec",
    "MixerState",
    "RMSNorm",
    "ShortConvolution",
    "StateError",
    "StateMixer",
    "StateMixerState",
    "build_mixer",
]
