"""Comba: a scalar plus low rank transition, in which forgetting along the key is weaker than writing.

    S_t = S_{t-1} (alpha_t I - b_t beta_t k_t k_t^T) + beta_t v_t k_t^T        |k_t| = 1

The erasure reads what the state held before the decay: gated DeltaNet has alpha_t (I - beta_t k_t k_t^T) here.
The paper also corrects the query, q_t - d k_t with one trained d for each head, which is no part of M_t.

Shapes: B batch, T time, H key heads, HV value heads, K key_dim. Source: arXiv:2506.02475 section 3.
"""

import torch
from torch import Tensor

from statemix.kernels import NormalForm
from statemix.transitions import LogDecay, Rate, Transition, UnitKey


class Comba(Transition):
    """alpha_t I - b_t beta_t k_t k_t^T.

    Attributes:
        log_decay: log alpha <= 0, [B, T, HV].
        key: k, the write key, [B, T, H, K].
        beta: the write in [0, 1], [B, T, HV].
        feedback: b in [0, 1], the share of the write that is erased, [B, T, HV].
    """

    log_decay: LogDecay
    key: UnitKey
    beta: Rate
    feedback: Rate

    @property
    def eigenvalue_range(self) -> tuple[float, float]:
        return -1.0, 1.0

    @property
    def natural_write(self) -> Tensor:
        return self.beta

    def apply(self, state: Tensor) -> Tensor:
        removed = torch.einsum("...vk,...k->...v", state, self.key)
        erased = (self.feedback * self.beta)[..., None, None] * removed[..., :, None] * self.key[..., None, :]
        return self.log_decay.exp()[..., None, None] * state - erased

    def lower(self) -> NormalForm:
        beta = self.feedback * self.beta
        return NormalForm(self.log_decay, erase=(self.key, self.key), reads_before_decay=True, erase_beta=beta)
