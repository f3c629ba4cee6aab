"""Residual blocks and the causal language model made of them."""

from statemix.mixers import RMSNorm

from .block import Block
from .causal_lm import CausalLM, ModelState
from .generate import generate
from .swiglu import SwiGLU

__all__ = ["Block", "CausalLM", "ModelState", "RMSNorm", "SwiGLU", "generate"]
