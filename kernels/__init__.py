"""Tensors in, tensors out: the normal form of a transition and the forms that run it."""

from .additive_op import additive_scan, recurrent_scan
from .additive_rows import AdditiveRows, additive_rows
from .availability import device_obstacle, size_obstacle
from .chunk import chunk_scan
from .delta_op import delta_recurrent_scan, delta_scan
from .delta_operands import DeltaOperands
from .delta_rows import delta_rows
from .normal_form import MicroSteps, NormalForm, expand_heads, merge_write, num_micro_steps
from .scan_operators import needs_gradient
from .segment import Segment, merge
from .tuning_file import tuned

__all__ = [
    "AdditiveRows",
    "DeltaOperands",
    "MicroSteps",
    "NormalForm",
    "Segment",
    "additive_rows",
    "additive_scan",
    "chunk_scan",
    "delta_recurrent_scan",
    "delta_rows",
    "delta_scan",
    "device_obstacle",
    "expand_heads",
    "merge",
    "merge_write",
    "needs_gradient",
    "num_micro_steps",
    "recurrent_scan",
    "size_obstacle",
    "tuned",
]
