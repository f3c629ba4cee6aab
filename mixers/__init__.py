"""Sequence mixers: the recurrence with any transition, and softmax attention."""

from .attention import Attention
from .capabilities import Capabilities
from .convolution import ShortConvolution
from .feature_map import FEATURE_MAPS, FeatureMap
from .mixer import MIXERS, Mixer, MixerSpec, build_mixer
from .packing import num_sequences
from .rms_norm import RMSNorm
from .state import AttentionState, MixerState, StateError, StateMixerState, check_state, opened
from .state_mixer import StateMixer

__all__ = [
    "FEATURE_MAPS",
    "MIXERS",
    "Attention",
    "AttentionState",
    "Capabilities",
    "FeatureMap",
    "Mixer",
    "MixerSpec",
    "MixerState",
    "RMSNorm",
    "ShortConvolution",
    "StateError",
    "StateMixer",
    "StateMixerState",
    "build_mixer",
    "check_state",
    "num_sequences",
    "opened",
]
