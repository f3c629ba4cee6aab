"""A run of tokens as one affine map of the state, S -> S P + H.

Maps merge: (P1, H1), then (P2, H2), is (P1 P2, H1 P2 + H2). One summary serves long sequences with few heads, context
parallelism across ranks and handing a state over.

Shapes: N sequences, HV value heads, K key_dim, V value_dim.
Source: arXiv:2404.02882 (exchanging segment states), written for matrix transitions.
"""

from typing import NamedTuple

from torch import Tensor


class Segment(NamedTuple):
    """P [N, HV, K, K] and H [N, HV, V, K]."""

    transition: Tensor
    update: Tensor

    def apply(self, state: Tensor) -> Tensor:
        """The state after the segment, for a state [N, HV, V, K] before it."""
        return state @ self.transition + self.update


def merge(first: Segment, second: Segment) -> Segment:
    """The segment ``first`` followed by ``second``."""
    return Segment(first.transition @ second.transition, first.update @ second.transition + second.update)
