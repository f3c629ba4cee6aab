"""RWKV-7: a decay for each key channel, and an erasure along a direction of its own with a rate for each key channel.

    S_t = S_{t-1} (Diag(w_t) - kappa_t (a_t * kappa_t)^T) + v_t k_t^T        |kappa_t| = 1

The erasure reads what the state held before the decay. For a >= 0 M_t is similar to the symmetric
Diag(w) - (sqrt(a) kappa)(sqrt(a) kappa)^T, so its eigenvalues are real and lie in [-1, 1].

Shapes: B batch, T time, H key heads, HV value heads, K key_dim. Source: arXiv:2503.14456 section 4.
"""

import torch
from torch import Tensor

from statemix.kernels import NormalForm
from statemix.transitions import KeyLogDecay, KeyRate, Transition, UnitKey


class RWKV7(Transition):
    """Diag(w_t) - kappa_t (a_t * kappa_t)^T.

    Attributes:
        log_decay: log w <= 0, [B, T, HV, K].
        removal: kappa, the direction that is erased, [B, T, H, K].
        rate: a, the in-context learning rate in [0, 1], [B, T, HV, K].
    """

    log_decay: KeyLogDecay
    removal: UnitKey
    rate: KeyRate

    @property
    def eigenvalue_range(self) -> tuple[float, float]:
        return -1.0, 1.0

    def apply(self, state: Tensor) -> Tensor:
        removed = torch.einsum("...vk,...k->...v", state, self.removal)
        decayed = state * self.log_decay.exp().unsqueeze(-2)
        return decayed - removed[..., :, None] * (self.rate * self.removal)[..., None, :]

    def lower(self) -> NormalForm:
        removal = self.expand_heads(self.rate.shape[-2]).removal
        return NormalForm(self.log_decay, erase=(removal, self.rate * removal), reads_before_decay=True)
