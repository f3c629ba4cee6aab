"""Transitions M_t of S_t = S_{t-1} M_t + w_t v_t k_t^T, one file each, and the scan that runs them."""

from .base import Transition
from .block_diagonal import BlockDiagonal, BlockDiagonalModule
from .diagonal_gate import DiagonalGate, DiagonalGateModule
from .engine.attention_matrix import attention_matrix
from .engine.choice import Explanation
from .engine.scan import ScanResult, explain, scan, segment_summary, step, validate
from .fixed_decay import FixedDecay, FixedDecayModule
from .householder import Householder, HouseholderModule
from .identity import Identity, IdentityModule
from .kinds import Constant, Key, KeyLogDecay, KeyRate, Kind, LogDecay, Rate, Rate2, UnitKey
from .modules.fields_module import register_transition
from .modules.module import FactorConfig, HeadSizes, TransitionModule
from .modules.plugin import register_transitions
from .modules.registry import TRANSITIONS, TransitionSpec, register, transition_names
from .product import Product, ProductModule, build_transition
from .scalar_gate import ScalarGate, ScalarGateModule

__all__ = [
    "TRANSITIONS",
    "BlockDiagonal",
    "BlockDiagonalModule",
    "Constant",
    "DiagonalGate",
    "DiagonalGateModule",
    "Explanation",
    "FactorConfig",
    "FixedDecay",
    "FixedDecayModule",
    "HeadSizes",
    "Householder",
    "HouseholderModule",
    "Identity",
    "IdentityModule",
    "Key",
    "KeyLogDecay",
    "KeyRate",
    "Kind",
    "LogDecay",
    "Product",
    "ProductModule",
    "Rate",
    "Rate2",
    "ScalarGate",
    "ScalarGateModule",
    "ScanResult",
    "Transition",
    "TransitionModule",
    "TransitionSpec",
    "UnitKey",
    "Constant",
    "attention_matrix",
    "build_transition",
    "explain",
    "register",
    "register_transition",
    "register_transitions",
    "scan",
    "segment_summary",
    "step",
    "transition_names",
    "validate",
]
