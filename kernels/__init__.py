"""Tensors in, tensors out: the normal form of a transition and the forms that run it."""

from .additive_op import additive_scan, needs_gradient, recurrent_scan
from .additive_rows import AdditiveRows, additive_rows
from .availability import device_obstacle, size_obstacle
from .chunk import chunk_scan
from .normal_form import MicroSteps, NormalForm, expand_heads, merge_write
from .segment import Segment, merge
from .tuning_file import tuned

__all__ = [
    "AdditiveRows",
    "MicroSteps",
    "NormalForm",
    "Segment",
    "additive_rows",
    "additive_scan",
    "chunk_scan",
    "device_obstacle",
    "expand_heads",
    "merge",
    "merge_write",
    "needs_gradient",
    "recurrent_scan",
    "size_obstacle",
    "tuned",
]
