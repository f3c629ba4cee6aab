"""A dense M_t: every token moves the contents of the key channels around, as an automaton moves between its states.

    S_t = S_{t-1} M_t + v_t k_t^T,      M_t = alpha_t softmax(x_t y_t^T) over each row

Each row of the softmax sums to one, so M_t has spectral radius alpha_t and nothing grows. It is of full rank: no decay
followed by a few erasures is such a matrix, hence no ``lower``, and it runs one token after another.

Shapes: B batch, T time, H key heads, HV value heads, K key_dim. Source: arXiv:2412.19350 has dense input-dependent M_t
(there a softmax mixture of trained matrices); this parametrisation by two vectors is a toy.
"""

import torch
from torch import Tensor

from statemix.transitions import Key, LogDecay, Transition


class Dense(Transition):
    """alpha_t softmax(x_t y_t^T).

    Attributes:
        log_decay: log alpha <= 0, [B, T, HV].
        source: x, one number for each row, [B, T, H, K].
        target: y, one number for each column, [B, T, H, K].
    """

    log_decay: LogDecay
    source: Key
    target: Key

    @property
    def spectral_radius(self) -> float:
        return 1.0

    def apply(self, state: Tensor) -> Tensor:
        routes = torch.softmax(self.source[..., :, None] * self.target[..., None, :], dim=-1)
        return self.log_decay.exp()[..., None, None] * (state @ routes)
