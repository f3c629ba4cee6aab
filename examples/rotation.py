"""Rotations: pairs of key channels turn by an angle that depends on the token. Complex eigenvalues alpha e^{+-i phi}.

    S_t = alpha_t S_{t-1} diag(R(phi_t), R(phi_t f), R(phi_t f^2), ...) + v_t k_t^T,      f = 10000^(-2 / K)

Neighbouring channels turn together, as in rotary embeddings, whose angles do not depend on the token. No ``lower``: a
rotation is two reflections, so the normal form would take K erasures a token. (These matrices commute, so the fast way
is a scalar gate on queries and keys that are turned by the cumulative angles: no matter of M_t alone.)

Shapes: B batch, T time, HV value heads, K key_dim, even. Source: arXiv:2603.15569 (Mamba-3, complex states).
"""

from typing import Annotated

import torch
from torch import Tensor

from statemix.transitions import Kind, LogDecay, Transition

Angle = Annotated[Tensor, Kind("Angle")]  # [B, T, HV], any number, in radians


class Rotation(Transition):
    """alpha_t R(phi_t f^c) on every pair c of key channels.

    Attributes:
        log_decay: log alpha <= 0, [B, T, HV].
        angle: phi, [B, T, HV].
    """

    log_decay: LogDecay
    angle: Angle

    @property
    def spectral_radius(self) -> float:
        return 1.0

    def apply(self, state: Tensor) -> Tensor:
        first, second = state.unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.arange(first.shape[-1], dtype=state.dtype, device=state.device)
        angle = self.angle[..., None, None] * 10000 ** (-pairs / len(pairs))
        turned = (first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos())
        return self.log_decay.exp()[..., None, None] * torch.stack(turned, dim=-1).flatten(-2)
