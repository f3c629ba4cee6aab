"""The normal form: what a kernel needs to know of a transition.

Every transition that has a chunk form lowers to n micro-steps a token, decay first, then read-erase-write:

    S <- S Diag(d_t);   for j = 1..n:   u = v_tj - S a_tj,   S <- S + u b_tj^T;      o_t = scale * S q_t

a = 0 gives linear attention and gates; a = beta k, b = k gives the delta rule. Either way
S_t = S_{t-1} Diag(d_t) + U_t^T B_t: the delta family is the additive family run on corrected values u.

Shapes: B batch, T time, N micro-steps a token, H key heads, HV value heads, K key_dim, V value_dim, blocks.
Source: arXiv:2406.06484 section 3 (delta rule), arXiv:2502.10297 section 3 (n micro-steps).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormalForm:
    """M_t as a decay followed by erasures S <- S (I - a b^T); the write is merged in by ``merge_write``.

    Attributes:
        log_decay: log d_t: None, [HV], [HV, blocks], [B, T, HV], [B, T, HV, blocks] or [B, T, HV, K].
        erase: (a, b), a [B, T, HV, K] and b [B, T, H or HV, K], each with an axis m after T for m erasures a token.
        reads_before_decay: the first erasure of a token reads the state before its decay.
        blocks: M_t is block-diagonal with this many blocks of K / blocks.
    """

    log_decay: Tensor | None = None
    erase: tuple[Tensor, Tensor] | None = None
    reads_before_decay: bool = False
    blocks: int = 1


@dataclass(frozen=True)
class MicroSteps:
    """Rows of the recurrence above, erasure and write together.

    Attributes:
        value: v, [B, T, N, HV, V], or [B, T, N, HV, blocks, V] when the write differs between blocks.
        read: a, [B, T, N, HV, K], or None for a = 0 (the additive family).
        key: b, [B, T, N, H or HV, K].
        log_decay, reads_before_decay, blocks: as in ``NormalForm``.
    """

    value: Tensor
    read: Tensor | None
    key: Tensor
    log_decay: Tensor | None
    reads_before_decay: bool
    blocks: int


def merge_write(form: NormalForm, k: Tensor, v: Tensor, write: Tensor | None) -> MicroSteps:
    """Join the erasures of ``form`` with the writes w v k^T of a token.

    An erasure along the write key itself (``form.erase[1] is k``) shares its micro-step with the write; any other
    direction takes two, first S <- S (I - a b^T), then the write.

    Args:
        k: [B, T, H, K], or [B, T, n, H, K] for n writes a token.
        v: [B, T, HV, V], or [B, T, n, HV, V].
        write: None for 1, [B, T, HV], or [B, T, n, HV]; with a last axis ``blocks`` when it differs between blocks.

    Raises:
        NotImplementedError: the number of erasures a token is neither that of the writes nor met by a single write.
    """
    value, keys = _write_rows(k, v, write)
    if form.erase is None:
        return MicroSteps(value, None, keys, form.log_decay, False, form.blocks)
    if form.erase[1] is k:
        return MicroSteps(value, _rows(form.erase[0]), keys, form.log_decay, form.reads_before_decay, form.blocks)

    read, direction = (_rows(x) for x in form.erase)
    keys, direction = _equal_heads(keys, direction)
    num_erasures, num_writes = read.shape[2], keys.shape[2]
    erased = value.new_zeros(value.shape[:2] + (num_erasures,) + value.shape[3:])
    unread = read.new_zeros(read.shape[:2] + (num_writes,) + read.shape[3:])
    pairs = ((erased, value), (read, unread), (direction, keys))
    if num_erasures == num_writes:
        value, read, keys = (torch.stack(pair, dim=3).flatten(2, 3) for pair in pairs)
    elif num_writes == 1:
        value, read, keys = (torch.cat(pair, dim=2) for pair in pairs)
    else:
        raise NotImplementedError(f"erase: {num_erasures} erasures and {num_writes} writes a token have no normal form")
    return MicroSteps(value, read, keys, form.log_decay, form.reads_before_decay, form.blocks)


def _write_rows(k: Tensor, v: Tensor, write: Tensor | None) -> tuple[Tensor, Tensor]:
    """w v and k with the axis N: a last axis of ``write`` beyond [B, T, N, HV] counts blocks."""
    if k.ndim == 4:
        k, v, write = k.unsqueeze(2), v.unsqueeze(2), None if write is None else write.unsqueeze(2)
    if write is None:
        return v, k
    if write.ndim == v.ndim:
        v = v.unsqueeze(-2)
    return write.unsqueeze(-1) * v, k


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 5 else x.unsqueeze(2)


def _equal_heads(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    heads = max(x.shape[3], y.shape[3])
    return expand_heads(x, heads, dim=3), expand_heads(y, heads, dim=3)


def expand_heads(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """Repeat each head so that value head h reads key head h // (HV / H)."""
    return x if x.shape[dim] == num_heads else x.repeat_interleave(num_heads // x.shape[dim], dim)
