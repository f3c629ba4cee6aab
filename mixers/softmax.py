"""Causal softmax attention over the keys that a query may see, on scaled_dot_product_attention.

    o_t = sum_s softmax_s(q_t k_s / sqrt(D)) v_s        over s = max(0, t - window + 1) .. t

Shapes: B batch, T new tokens, S = P + T keys, P cached ones, H query heads, Hkv key heads, D head_dim, C block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, *, filled: Tensor, window: int | None) -> Tensor:
    """Read out for the last T of S tokens.

    Args:
        query: [B, T, H, D].
        key: [B, S, Hkv, D], H a multiple of Hkv.
        value: [B, S, Hkv, D].
        filled: how many of the P cached keys are real, the last ones, [B].
        window: a query sees itself and the window - 1 tokens before it; None sees all.

    Returns:
        [B, T, H, D]. Costs O(T * S) without a window and O(T * window) with one.
    """
    seq_len, past = query.shape[1], key.shape[1] - query.shape[1]
    if past == 0 and (window is None or window >= seq_len):
        return _attention(query, key, value, mask=None)
    # In blocks the keys are copied once more; measured on two CPU cores this pays from about 4 windows on.
    if window is not None and seq_len > 4 * max(window, 64):
        return _attend_in_blocks(query, key, value, filled=filled, window=window)
    device = query.device
    position = torch.arange(-past, seq_len, device=device)
    mask = _visible(torch.arange(seq_len, device=device), position, window=window)
    if past > 0:
        mask = mask & (position >= -filled[:, None])[:, None, None]
    return _attention(query, key, value, mask=mask)


def _attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, *, filled: Tensor, window: int) -> Tensor:
    """Blocks of C queries, each with the C + window - 1 keys that they can see."""
    (batch, seq_len), past = query.shape[:2], key.shape[1] - query.shape[1]
    block = max(window, 64)
    num_blocks = -(-seq_len // block)
    tail = num_blocks * block - seq_len

    def blocked(stream: Tensor) -> Tensor:
        stream = F.pad(stream, (0, 0, 0, 0, window - 1 - past, tail))
        return stream.unfold(1, block + window - 1, block).movedim(-1, 2).flatten(0, 1)

    offset = torch.arange(1 - window, block, device=query.device)
    position = offset + block * torch.arange(num_blocks, device=query.device)[:, None]
    band = _visible(torch.arange(block, device=query.device), offset, window=window)
    real = position >= -filled.clamp(max=past)[:, None, None]
    mask = (band & real[:, :, None]).flatten(0, 1)[:, None]
    rows = F.pad(query, (0, 0, 0, 0, 0, tail)).unflatten(1, (num_blocks, block)).flatten(0, 1)
    heads = _attention(rows, blocked(key), blocked(value), mask=mask)
    return heads.reshape(batch, -1, *heads.shape[2:])[:, :seq_len]


def _visible(query_position: Tensor, key_position: Tensor, *, window: int | None) -> Tensor:
    """[queries, keys], True where the key is not later than the query and inside its window."""
    distance = query_position[:, None] - key_position
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
    ).transpose(1, 2)
