"""Residual blocks and the causal language model made of them."""

from statemix.mixers import RMSNorm

from .block import Block
from .causal_lm import CausalLM, ModelState
from .generate import generate
from .mlp import MLPS
from .norm import NORMS
from .swiglu import SwiGLU

__all__ = ["MLPS", "NORMS", "Block", "CausalLM", "ModelState", "RMSNorm", "SwiGLU", "generate"]
