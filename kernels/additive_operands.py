"""The tensors of a scan of the additive family, as every implementation of it takes them.

Shapes: B batch, T time, HQ HK HV heads, K key_dim, V value_dim, N sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class AdditiveOperands(NamedTuple):
    """Operands of S <- S Diag(e^{log_decay_t}) + v_t k_t^T, o_t = scale * S q_t.

    Attributes:
        q: [B, T, HQ, K].
        k: [B, T, HK, K].
        v: [B, T, HV, V], of one dtype with q and k; HV is a multiple of HQ and of HK.
        log_decay: None, [HV], [B, T, HV] or [B, T, HV, K].
        initial_state: [N, HV, V, K] in ``state_dtype``, or None for zeros.
        cu_seqlens: int32 [N + 1] with B = 1, or None for a batch.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def state_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def empty_output(self) -> Tensor:
        """[B, T, HV, V] in the dtype of q, unwritten."""
        return self.v.new_empty(self.v.shape)

    def empty_state(self) -> Tensor:
        """[N, HV, V, K], unwritten."""
        num_states = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return self.q.new_empty(num_states, *self.v.shape[-2:], self.q.shape[-1], dtype=self.state_dtype)

    def contiguous(self) -> "AdditiveOperands":
        q, k, v, *others = self
        return AdditiveOperands(
            q.contiguous(), k.contiguous(), v.contiguous(), *(None if x is None else x.contiguous() for x in others)
        )
