"""Tensors in, tensors out: the normal form of a transition and the forms that run it."""

from .chunk import chunk_scan
from .normal_form import MicroSteps, NormalForm, expand_heads, merge_write
from .segment import Segment, merge

__all__ = ["MicroSteps", "NormalForm", "Segment", "chunk_scan", "expand_heads", "merge", "merge_write"]
