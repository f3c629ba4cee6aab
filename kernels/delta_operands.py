"""The tensors of a scan of the delta family, as every implementation of it takes them.

Shapes: B batch, T time, n micro-steps a token, R = T n rows, HQ HA HB HV heads, K key_dim, V value_dim, N sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .launch_config import DeltaConfig
from .spans import ceil_div


class DeltaOperands(NamedTuple):
    """Operands of n micro-steps a token, the decay before the first:

        S <- S Diag(e^{log_decay_t});   u_r = w_r v_r - r_r S a_r,   S <- S + u_r b_r^T   for each row r of the token;
        o_t = scale * S q_t

    Attributes:
        q: [B, T, HQ, K].
        a: [B, R, HA, K], or None for b itself.
        b: [B, R, HB, K].
        v: [B, R, HV, V], of one dtype with q, a and b; HV is a multiple of HQ, HA and HB.
        rate: r, [B, R, HV], or None for 1.
        weight: w, [B, R, HV], or None for 1.
        log_decay: None, [B, T, HV] or [B, T, HV, K].
        initial_state: [N, HV, V, K] in ``state_dtype``, or None for zeros.
        cu_seqlens: int32 [N + 1] in tokens, with B = 1, or None for a batch.
        reads_before_decay: the first row of a token reads the state before its decay.
    """

    q: Tensor
    a: Tensor | None
    b: Tensor
    v: Tensor
    rate: Tensor | None
    weight: Tensor | None
    log_decay: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    reads_before_decay: bool

    @property
    def state_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def num_steps(self) -> int:
        """n."""
        return self.b.shape[1] // self.q.shape[1] if self.q.shape[1] else 1

    def empty_output(self) -> Tensor:
        """[B, T, HV, V] in the dtype of q, unwritten."""
        return self.q.new_empty(*self.q.shape[:2], *self.v.shape[2:])

    def empty_state(self) -> Tensor:
        """[N, HV, V, K], unwritten."""
        num_states = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return self.q.new_empty(num_states, *self.v.shape[-2:], self.q.shape[-1], dtype=self.state_dtype)

    def cast(self, dtype: torch.dtype) -> "DeltaOperands":
        """Every tensor but the offsets in ``dtype``."""
        *tensors, cu_seqlens, reads_before_decay = self
        return DeltaOperands._make(
            [*(None if x is None else x.to(dtype) for x in tensors), cu_seqlens, reads_before_decay]
        )

    def contiguous(self) -> "DeltaOperands":
        *tensors, reads_before_decay = self
        return DeltaOperands._make([*(None if x is None else x.contiguous() for x in tensors), reads_before_decay])


def most_segments(operands: DeltaOperands, config: DeltaConfig) -> int:
    """Segments that a walk over these rows can have; see ``CutRule.most_segments``."""
    batch, rows, heads, value_dim = operands.v.shape
    num_documents = None if operands.cu_seqlens is None else operands.cu_seqlens.shape[0] - 1
    programs = heads * ceil_div(value_dim, config.walk.block) * (batch if num_documents is None else num_documents)
    return config.cut_rule.most_segments(batch, rows, programs, num_documents)


class DeltaGradients(NamedTuple):
    """Gradients of the operands, each in the shape and dtype of its own; None where that is None.

    Attributes:
        a: None where ``DeltaOperands.a`` is None too: its share is then in ``b``.
        log_decay: None also where it is not wanted.
        initial_state: [N, HV, V, K] in ``state_dtype``, whether or not there is one.
    """

    q: Tensor
    a: Tensor | None
    b: Tensor
    v: Tensor
    rate: Tensor | None
    weight: Tensor | None
    log_decay: Tensor | None
    initial_state: Tensor
