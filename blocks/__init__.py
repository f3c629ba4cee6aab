"""Residual blocks and the causal language model made of them."""

from statemix.mixers import RMSNorm

from .block import Block
from .causal_lm import CausalLM, ModelState
from .generate import generate
from .mlp import MLPS, build_mlp
from .norm import NORMS, build_norm
from .swiglu import SwiGLU

__all__ = [
    "MLPS",
    "NORMS",
    "Block",
    "CausalLM",
    "ModelState",
    "RMSNorm",
    "SwiGLU",
    "build_mlp",
    "build_norm",
    "generate",
]
