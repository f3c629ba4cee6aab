"""Gated DeltaNet-2: the delta rule with a decay and an erase gate for each key channel.

    S_t = S_{t-1} Diag(e^{g_t}) (I - (b_t * k_t) k_t^T) + (w_t * v_t) k_t^T        |k_t| = 1

b gates what is read and erased, on K; w gates what is written, on V. A vector w is no scale of v k^T: it makes a value
of its own, so w * v is what to pass as v, and the write stays 1. I - (b * k) k^T is similar to a symmetric matrix
between 0 and I, by a diagonal that commutes with the decay: M_t has real eigenvalues in [0, 1].

Shapes: B batch, T time, H key heads, HV value heads, K key_dim. Source: arXiv:2605.22791 section 3 (there S is [K, V]).
"""

import torch
from torch import Tensor

from statemix.kernels import NormalForm
from statemix.transitions import KeyLogDecay, KeyRate, Transition, UnitKey


class GDN2(Transition):
    """Diag(e^{g_t}) (I - (b_t * k_t) k_t^T).

    Attributes:
        log_decay: g <= 0, [B, T, HV, K].
        key: k, the write key, [B, T, H, K].
        erase: b in [0, 1], [B, T, HV, K].
    """

    log_decay: KeyLogDecay
    key: UnitKey
    erase: KeyRate

    @property
    def eigenvalue_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def apply(self, state: Tensor) -> Tensor:
        decayed = state * self.log_decay.exp().unsqueeze(-2)
        removed = torch.einsum("...vk,...k->...v", decayed, self.erase * self.key)
        return decayed - removed[..., :, None] * self.key[..., None, :]

    def lower(self) -> NormalForm:
        key = self.expand_heads(self.erase.shape[-2]).key
        return NormalForm(self.log_decay, erase=(self.erase * key, self.key))
