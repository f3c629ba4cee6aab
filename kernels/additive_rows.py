"""The additive family as plain rows (q, k, v, log_decay), one row one write: what its kernels take.

    S <- S Diag(e^{log_decay_r}) + v_r k_r^T        o_r = scale * S q_r

Without erasures nothing else of the normal form is left: a write w is part of v (w v k^T), or of k where it differs
between the blocks of K; a decay per block is one per channel; and n writes a token are n rows, of which the first
alone decays and the last alone is read out. Blocks themselves need nothing: M_t is diagonal with or without them.

Shapes: B batch, T time, n writes a token, R = T n rows, H key heads, HV value heads, K key_dim, V value_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .normal_form import NormalForm, expand_heads


class AdditiveRows(NamedTuple):
    """Rows, and how to get back to tokens.

    Attributes:
        q: [B, R, H, K].
        k: [B, R, H or HV, K], in the dtype of q.
        v: [B, R, HV, V], in the dtype of q.
        log_decay: None, [HV], [B, R, HV] or [B, R, HV, K].
        cu_seqlens: offsets of documents in rows, or None.
        num_writes: n.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    cu_seqlens: Tensor | None
    num_writes: int

    def tokens(self, output: Tensor) -> Tensor:
        """The output of each token's last row, [B, T, HV, V]."""
        return output if self.num_writes == 1 else output.unflatten(1, (-1, self.num_writes))[:, :, -1]


def additive_rows(
    q: Tensor, k: Tensor, v: Tensor, form: NormalForm, *, write: Tensor | None, cu_seqlens: Tensor | None
) -> AdditiveRows:
    """Reduce a scan without erasures; nothing is copied for one write a token of weight 1.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K] or [B, T, n, H, K].
        v: [B, T, HV, V] or [B, T, n, HV, V].
        form: with ``erase`` None.
        write: None, [B, T, HV] or [B, T, n, HV], with a last axis of blocks where they differ.
        cu_seqlens: [N + 1] in tokens, or None.
    """
    assert form.erase is None
    k, v = _fold_write(k, v, write, dtype=q.dtype)
    log_decay = plain_decay(form.log_decay, (*q.shape[:2], v.shape[-2]), key_dim=q.shape[-1])
    num_writes = 1 if k.ndim == 4 else k.shape[2]
    if k.ndim == 5:
        k, v = k.flatten(1, 2), v.flatten(1, 2)
    if num_writes > 1:
        q = q.unsqueeze(2).expand(-1, -1, num_writes, -1, -1).flatten(1, 2)
        log_decay = None if log_decay is None else _first_rows(log_decay, (*q.shape[:2], v.shape[-2]), num_writes)
        cu_seqlens = None if cu_seqlens is None else cu_seqlens * num_writes
    return AdditiveRows(q, k, v, log_decay, cu_seqlens, num_writes)


def _fold_write(k: Tensor, v: Tensor, write: Tensor | None, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and w v, or w k and v: the product is rounded once, to ``dtype``."""
    if write is None:
        return k, v
    if write.ndim < v.ndim:
        return k, (write.unsqueeze(-1) * v).to(dtype)
    if write.shape[-1] == 1:
        return k, (write * v).to(dtype)
    by_channel = write.repeat_interleave(k.shape[-1] // write.shape[-1], dim=-1)
    return (by_channel * expand_heads(k, v.shape[-2], dim=k.ndim - 2)).to(dtype), v


def plain_decay(log_decay: Tensor | None, lead: tuple[int, int, int], *, key_dim: int) -> Tensor | None:
    """Any log_decay of the normal form as None, [HV], [B, T, HV] or [B, T, HV, K]; ``lead`` is (B, T, HV)."""
    if log_decay is None or log_decay.ndim == 1 or log_decay.shape in (lead, (*lead, key_dim)):
        return log_decay  # no view of itself, which autograd would record
    if log_decay.ndim == 3:
        return log_decay if log_decay.shape == lead else log_decay.expand(lead)
    if log_decay.shape[-1] == 1 and key_dim > 1:
        shared = log_decay.squeeze(-1)
        return shared if shared.ndim == 1 else shared.expand(lead)
    if log_decay.shape[-1] != key_dim:
        log_decay = log_decay.repeat_interleave(key_dim // log_decay.shape[-1], dim=-1)
    return log_decay if log_decay.shape[:3] == lead else log_decay.expand(*lead, key_dim)


def _first_rows(log_decay: Tensor, lead: tuple[int, int, int], num_writes: int) -> Tensor:
    """The decay of a token on its first row, 0 on the others; ``lead`` is (B, R, HV)."""
    batch, num_rows, num_heads = lead
    if log_decay.ndim == 1:
        log_decay = log_decay.expand(batch, num_rows // num_writes, num_heads)
    others = log_decay.new_zeros(*log_decay.shape[:2], num_writes - 1, *log_decay.shape[2:])
    return torch.cat([log_decay.unsqueeze(2), others], dim=2).flatten(1, 2)
