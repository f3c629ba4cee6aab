"""A scan with erasures as the rows that the kernels of the delta family take; see ``delta_operands``.

An erasure along the write key shares its row with the write: a and b are k itself where the normal form holds a rate
beside them, and nothing is multiplied or copied. Any other direction takes two rows, first the erasure (v = 0), then
the write (a rate of 0). Blocks of K become heads of K / blocks channels, HV = HO blocks of them: value head h has the
heads h blocks to (h + 1) blocks - 1. ``merge_write`` is the same for the torch forms.

Shapes: B batch, T time, n micro-steps a token, R = T n rows, H key heads, HO value heads, K key_dim, V value_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .additive_rows import plain_decay
from .chunk import decay_per_block, fold_key
from .delta_operands import DeltaOperands
from .normal_form import NormalForm, equal_heads, erase_then_write, expand_heads, num_micro_steps, with_rows, zero_rows


class _Rows(NamedTuple):
    """The rows before blocks become heads.

    Attributes:
        read: a, [B, R, H or HO, K], or None for b itself.
        key: b, [B, R, H or HO, K].
        value: v, [B, R, HO, V].
        rate, weight: [B, R, HO], with or without a last axis of size 1 or blocks, or None for 1.
    """

    read: Tensor | None
    key: Tensor
    value: Tensor
    rate: Tensor | None
    weight: Tensor | None


def delta_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    form: NormalForm,
    *,
    write: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> DeltaOperands:
    """Reduce a scan with erasures; nothing is copied for erasures along the write key with a rate, without blocks.

    Args:
        q: [B, T, H, K].
        k: [B, T, H, K] or [B, T, n, H, K].
        v: [B, T, HO, V] or [B, T, n, HO, V].
        form: with an erasure.
        write: None, [B, T, HO] or [B, T, n, HO], with a last axis of blocks where they differ.
        initial_state: [N, HO, V, K], or None.
        cu_seqlens: [N + 1], or None.

    Raises:
        NotImplementedError: as ``num_micro_steps`` does.
    """
    num_micro_steps(form, k)
    assert form.erase is not None
    make_rows = _along_the_write_key if form.erase[1] is k else _in_another_direction
    read, key, value, rate, weight = make_rows(form.erase, k, v, form.rate, write, dtype=q.dtype)
    num_heads, blocks = v.shape[-2], form.blocks
    log_decay = _decay(form.log_decay, (*q.shape[:2], num_heads), key_dim=q.shape[-1], blocks=blocks)
    if blocks > 1:
        q, key = (_keys_of_blocks(x, num_heads, blocks) for x in (q, key))
        read = None if read is None else _keys_of_blocks(read, num_heads, blocks)
        if initial_state is not None:
            initial_state = fold_key(initial_state, blocks).movedim(-2, 2).flatten(1, 2)
    rate, weight = (None if x is None else _factors_of_blocks(x, blocks) for x in (rate, weight))
    return DeltaOperands(
        *(q, read, key, value, rate, weight, log_decay, initial_state, cu_seqlens),
        reads_before_decay=form.reads_before_decay,
        blocks=blocks,
    )


def _along_the_write_key(
    erase: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    rate: Tensor | None,
    write: Tensor | None,
    *,
    dtype: torch.dtype,
) -> _Rows:
    """Every tensor as it is, with an axis n joined to T: autograd walks back through each view that is made."""
    rows = _Rows(None if erase[0] is erase[1] else erase[0].to(dtype), k, v, rate, write)
    return rows if k.ndim == 4 else _Rows._make(None if x is None else x.flatten(1, 2) for x in rows)


def _in_another_direction(
    erase: tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    rate: Tensor | None,
    write: Tensor | None,
    *,
    dtype: torch.dtype,
) -> _Rows:
    """Erasures of a value 0 beside writes of a rate 0."""
    is_tied, rate, weight = erase[0] is erase[1], _with_axes(rate, erase[0]), _with_axes(write, k)
    read, (key, direction) = with_rows(erase[0]).to(dtype), equal_heads(with_rows(k), with_rows(erase[1]).to(dtype))
    value, num_erasures, num_writes = with_rows(v), direction.shape[2], key.shape[2]
    if rate is None and is_tied:
        rate = read.new_ones(*direction.shape[:3], v.shape[-2], 1)
    rows = _Rows(
        None if is_tied else erase_then_write(read, zero_rows(read, num_writes)),
        erase_then_write(direction, key),
        erase_then_write(zero_rows(value, num_erasures), value),
        None if rate is None else erase_then_write(rate, zero_rows(rate, num_writes)),
        None if weight is None else erase_then_write(zero_rows(weight, num_erasures), weight),
    )
    return _Rows._make(None if x is None else x.flatten(1, 2) for x in rows)


def _with_axes(x: Tensor | None, keys: Tensor) -> Tensor | None:
    """A rate or a write, with the axes that belong to ``keys``, as [B, T, n, HO, 1 or blocks]."""
    return None if x is None else with_rows(x if x.ndim == keys.ndim else x.unsqueeze(-1))


def _keys_of_blocks(x: Tensor, num_heads: int, blocks: int) -> Tensor:
    """[B, R, H or HO, K] as [B, R, HV, K / blocks]."""
    return fold_key(expand_heads(x, num_heads, dim=2), blocks).flatten(2, 3)


def _factors_of_blocks(x: Tensor, blocks: int) -> Tensor:
    """[B, R, HO], with or without a last axis of size 1 or blocks, as [B, R, HV]."""
    if blocks == 1:
        return x if x.ndim == 3 else x.squeeze(-1)
    x = x.unsqueeze(-1) if x.ndim == 3 else x
    return x.expand(*x.shape[:-1], blocks).flatten(2, 3)


def _decay(log_decay: Tensor | None, lead: tuple[int, int, int], *, key_dim: int, blocks: int) -> Tensor | None:
    """Any log_decay of the normal form as None, [B, T, heads] or [B, T, heads, K / blocks]; ``lead`` is (B, T, HO)."""
    if blocks == 1 or log_decay is None:
        plain = plain_decay(log_decay, lead, key_dim=key_dim)
        return plain if plain is None or plain.ndim > 1 else plain.expand(lead)
    by_head = decay_per_block(log_decay, blocks, key_dim)
    by_head = by_head.expand(*lead, *by_head.shape[3:]).flatten(2, 3)
    return by_head.squeeze(-1) if by_head.shape[-1] == 1 else by_head
