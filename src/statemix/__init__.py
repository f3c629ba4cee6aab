"""Composable sequence mixers around one recurrence, S_t = S_{t-1} M_t + w_t v_t k_t^T."""

from statemix.mixers import StateError
from statemix.transitions import Explanation, ScanResult, attention_matrix, explain, scan, step, validate

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "ScanResult",
    "StateError",
    "__version__",
    "attention_matrix",
    "explain",
    "scan",
    "step",
    "validate",
]
