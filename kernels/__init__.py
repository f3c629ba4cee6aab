"""Tensors in, tensors out: the normal form of a transition and the forms that run it."""

from .chunk import chunk_scan
from .normal_form import MicroSteps, NormalForm, expand_heads, merge_write

__all__ = ["MicroSteps", "NormalForm", "chunk_scan", "expand_heads", "merge_write"]
