"""Delta updates that the transitions of the package do not make, to time and verify the kernels with.

S (I - a b^T) reads along a and erases along b. Here a is not along b, or reads the state from before its decay: GDN-2,
RWKV-7 and Comba. ``examples/`` has the same three as a user would write them, with what their papers say.

Shapes: B batch, T time, H key heads, HV value heads, K key_dim.
"""

import torch
from torch import Tensor

from statemix.kernels import NormalForm
from statemix.transitions import KeyLogDecay, KeyRate, LogDecay, Rate, Transition, UnitKey


class DecayedChannelDelta(Transition):
    """M_t = Diag(e^{g_t}) (I - (r_t * k_t) k_t^T), as in GDN-2.

    Attributes:
        log_decay: g <= 0, [B, T, HV, K].
        key: k, the write key, [B, T, H, K].
        rate: r in [0, 1], [B, T, HV, K].
    """

    log_decay: KeyLogDecay
    key: UnitKey
    rate: KeyRate

    def apply(self, state: Tensor) -> Tensor:
        decayed = state * self.log_decay.exp().unsqueeze(-2)
        return _erase(decayed, _read(decayed, self.rate * self.key), self.key)

    def lower(self) -> NormalForm:
        key = self.expand_heads(self.rate.shape[-2]).key
        return NormalForm(self.log_decay, erase=(self.rate * key, self.key))


class UndecayedChannelDelta(Transition):
    """M_t = Diag(e^{g_t}) - u_t (r_t * u_t)^T, as in RWKV-7.

    Attributes:
        log_decay: g <= 0, [B, T, HV, K].
        direction: u, [B, T, H, K].
        rate: r in [0, 1], [B, T, HV, K].
    """

    log_decay: KeyLogDecay
    direction: UnitKey
    rate: KeyRate

    def apply(self, state: Tensor) -> Tensor:
        decayed = state * self.log_decay.exp().unsqueeze(-2)
        return _erase(decayed, _read(state, self.direction), self.rate * self.direction)

    def lower(self) -> NormalForm:
        direction = self.expand_heads(self.rate.shape[-2]).direction
        return NormalForm(self.log_decay, erase=(direction, self.rate * direction), reads_before_decay=True)


class UndecayedDelta(Transition):
    """M_t = e^{g_t} I - r_t beta_t k_t k_t^T, as in Comba.

    Attributes:
        log_decay: g <= 0, [B, T, HV].
        key: k, the write key, [B, T, H, K].
        beta: the write in [0, 1], [B, T, HV].
        feedback: r in [0, 1], the share of the write that is erased, [B, T, HV].
    """

    log_decay: LogDecay
    key: UnitKey
    beta: Rate
    feedback: Rate

    def apply(self, state: Tensor) -> Tensor:
        removed = (self.feedback * self.beta).unsqueeze(-1) * _read(state, self.key)
        return _erase(state * self.log_decay.exp()[..., None, None], removed, self.key)

    def lower(self) -> NormalForm:
        beta = self.feedback * self.beta
        return NormalForm(self.log_decay, erase=(self.key, self.key), reads_before_decay=True, erase_beta=beta)


def _read(state: Tensor, along: Tensor) -> Tensor:
    return torch.einsum("...vk,...k->...v", state, along)


def _erase(state: Tensor, removed: Tensor, along: Tensor) -> Tensor:
    return state - removed[..., :, None] * along[..., None, :]
