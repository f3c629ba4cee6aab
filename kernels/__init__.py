"""Tensors in, tensors out: the normal form of a transition and the forms that run it."""

from .availability import device_obstacle, size_obstacle
from .backends import backend_named, register_backend, unregister_backend
from .chunk import chunk_scan
from .normal_form import NormalForm, expand_heads, has_equal_values, is_same, is_transformed, num_micro_steps
from .operands import Gradients, ScanOperands, scan_operands
from .operators import chunk_kernels, needs_gradient, recurrent_kernels
from .segment import Segment, merge
from .tuning_file import tuned

__all__ = [
    "Gradients",
    "NormalForm",
    "ScanOperands",
    "Segment",
    "backend_named",
    "chunk_kernels",
    "chunk_scan",
    "device_obstacle",
    "expand_heads",
    "has_equal_values",
    "is_same",
    "is_transformed",
    "merge",
    "needs_gradient",
    "num_micro_steps",
    "recurrent_kernels",
    "register_backend",
    "scan_operands",
    "size_obstacle",
    "tuned",
    "unregister_backend",
]
