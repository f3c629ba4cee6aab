"""Longhorn: the closed form of an online regression, its M_t kept diagonal.

    S_t = S_{t-1} Diag(1 - delta_t k_t^2) + delta_t v_t k_t^T,      delta_t = beta_t / (1 + beta_t |k_t|^2)

Without the cut to the diagonal this is the delta rule with step size delta_t. The paper has a beta for each channel of
the value; here a head has one, so value_dim 1 and a head for each channel are the paper's model.

Shapes: B batch, T time, H key heads, HV value heads, K key_dim. Source: arXiv:2407.14207 section 3.
"""

import torch
from torch import Tensor

from statemix.kernels import NormalForm
from statemix.transitions import Key, Rate, Transition


class Longhorn(Transition):
    """Diag(1 - delta_t k_t^2).

    Attributes:
        key: k, the write key, of any length, [B, T, H, K].
        beta: in [0, 1], how much the new pair counts, [B, T, HV].
    """

    key: Key
    beta: Rate

    is_diagonal = True

    @property
    def eigenvalue_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    @property
    def natural_write(self) -> Tensor:
        key = self.expand_heads(self.beta.shape[-1]).key
        return self.beta / (1 + self.beta * key.square().sum(-1))

    def apply(self, state: Tensor) -> Tensor:
        erased = self.natural_write[..., None] * self.key.square()
        return state * (1 - erased).unsqueeze(-2)

    def lower(self) -> NormalForm:
        key = self.expand_heads(self.beta.shape[-1]).key
        return NormalForm(log_decay=torch.log1p(-self.natural_write[..., None] * key.square()))
