"""Decay inside a chunk: every exponent is a segment sum of log decays, hence <= 0.

For micro-steps i (token t) and j (token s <= t) of one chunk the products needed are

    pairs_ij = sum_c left_ic e^{L_ts,c} right_jc,      L_ts = sum of log_decay over s < r <= t.

L is summed as a segment. As a difference of two cumulative sums it would lose 1e-5 in float32 when -80 resets the
state every few tokens, and its gradient would cancel altogether; e^{-G} of a cumulative sum overflows.

``from_start`` = e^{sum up to t} carries the state at the chunk's start to i, ``to_end`` = e^{sum after s} carries j to
the chunk's end, ``total`` decays the state across the chunk.

Shapes: ... chunks and heads, C tokens of a chunk (a power of two), P left and N right ones a token, K key_dim.
Source: arXiv:2312.06635 section 4 (secondary chunking), arXiv:2405.21060 section 6 (segment sums).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkProducts:
    """Products of one chunk with the decay between their tokens.

    Attributes:
        pairs: [..., C * P, C * N], zero where the token on the right comes after the one on the left.
        left_from_start: left e^{sum up to t}, [..., C, P, K].
        right_to_end: right e^{sum after s}, [..., C, N, K].
        total: e^{sum over the chunk}, [..., 1 or K], or None for no decay.
    """

    pairs: Tensor
    left_from_start: Tensor
    right_to_end: Tensor
    total: Tensor | None


def chunk_products(left: Tensor, right: Tensor, log_decay: Tensor | None, *, first_reads_before: bool) -> ChunkProducts:
    """Decayed products of left [..., C, P, K] and right [..., C, N, K] for log_decay None, [..., C, 1] or [..., C, K].

    With ``first_reads_before`` the first on the left of each token reads the state before that token's decay; its
    products with those of its own token then mean nothing, and nothing reads them.
    """
    if log_decay is None:
        causal = _tokens_up_to(left.shape[-3], left)
        return ChunkProducts(_flat(left) @ _flat(right).mT * _per_step(causal, left, right), left, right, None)
    if log_decay.shape[-1] == 1:
        return _scalar_products(left, right, log_decay, first_reads_before)
    return _channel_products(left, right, log_decay, first_reads_before)


def _scalar_products(left: Tensor, right: Tensor, log_decay: Tensor, first_reads_before: bool) -> ChunkProducts:
    """One product for all, then the matrix e^L of tokens: the decay does not touch the channels."""
    chunk_size = left.shape[-3]
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=left.device).tril(-1)
    segments = torch.where(later, log_decay, 0.0).cumsum(dim=-2)  # [..., C, C]: sum of log_decay over s < r <= t
    between = segments.masked_fill(later.mT, -torch.inf).exp()
    from_start = log_decay.cumsum(dim=-2).exp()  # [..., C, 1]
    to_end = between[..., -1, :, None]
    total = from_start[..., -1, :]

    between, from_start = between.unsqueeze(-2), from_start.unsqueeze(-2)  # an axis for the micro-steps of a token
    if first_reads_before:
        earlier = torch.cat([torch.zeros_like(between[..., :1, :, :]), between[..., :-1, :, :]], dim=-3)
        before = torch.cat([torch.ones_like(from_start[..., :1, :, :]), from_start[..., :-1, :, :]], dim=-3)
        others = left.shape[-2] - 1
        between = torch.cat([earlier, between.expand(*between.shape[:-2], others, chunk_size)], dim=-2)
        from_start = torch.cat([before, from_start.expand(*from_start.shape[:-2], others, 1)], dim=-2)
    pairs = _flat(left) @ _flat(right).mT * _per_step(between, left, right)
    return ChunkProducts(pairs, left * from_start, right * to_end.unsqueeze(-2), total)


def _channel_products(left: Tensor, right: Tensor, log_decay: Tensor, first_reads_before: bool) -> ChunkProducts:
    """Double the block size from one token to the chunk.

    In a block of 2w tokens, the later half meets those of the earlier half across one boundary: the exponent
    splits there into a sum up to t and a sum after s, both <= 0, and the products are a plain matrix product. Nothing
    of the size C x C x K is ever formed, and the anchor lies between past and future.
    """
    pairs = left @ right.mT  # [..., C / w, w * P, w * N] from w = 1: those of one token see no decay between them
    left, right, total = (
        left.unsqueeze(-3),
        right.unsqueeze(-3),
        log_decay,
    )  # [..., C / w, w, P or N, K], [..., C / w, K]
    upto = log_decay[..., None, None, :].expand_as(left)
    if first_reads_before:
        upto = torch.cat([torch.zeros_like(upto[..., :1, :]), upto[..., 1:, :]], dim=-2)
    after = torch.zeros_like(log_decay)[..., None, None, :]
    while total.shape[-2] > 1:
        (_, left_late), (right_early, _) = _halves(left, 4), _halves(right, 4)
        (upto_early, upto_late), (after_early, after_late) = _halves(upto, 4), _halves(after, 4)
        total_early, total_late = _halves(total, 2)
        cross = _flat(left_late * upto_late.exp()) @ _flat(right_early * after_early.exp()).mT
        pairs = _join_triangle(*_halves(pairs, 3), cross)
        upto = torch.cat([upto_early, upto_late + total_early[..., None, None, :]], dim=-3)
        after = torch.cat([after_early + total_late[..., None, None, :], after_late], dim=-3)
        left, right, total = _pair_up(left), _pair_up(right), total_early + total_late
    left_from_start, right_to_end = left * upto.exp(), right * after.exp()
    return ChunkProducts(
        pairs.squeeze(-3), left_from_start.squeeze(-4), right_to_end.squeeze(-4), total.squeeze(-2).exp()
    )


def _halves(x: Tensor, ndim: int) -> tuple[Tensor, Tensor]:
    """Even and odd blocks of an array whose block axis is ``ndim`` axes from the end."""
    even, odd = x.unflatten(-ndim, (-1, 2)).unbind(-ndim)
    return even, odd


def _pair_up(x: Tensor) -> Tensor:
    """[..., C / w, w, P, K] -> [..., C / 2w, 2w, P, K]."""
    return x.unflatten(-4, (-1, 2)).flatten(-4, -3)


def _join_triangle(early: Tensor, late: Tensor, cross: Tensor) -> Tensor:
    """[[early, 0], [cross, late]]."""
    top = torch.cat([early, torch.zeros_like(early)], dim=-1)
    return torch.cat([top, torch.cat([cross, late], dim=-1)], dim=-2)


def _tokens_up_to(chunk_size: int, like: Tensor) -> Tensor:
    return like.new_ones(chunk_size, chunk_size).tril().unsqueeze(-2)  # [C, 1, C]


def _per_step(tokens: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """A matrix over tokens [..., C, 1 or P, C], repeated for the micro-steps of each: [..., C * P, C * N]."""
    num_left, num_right = left.shape[-2], right.shape[-2]
    if num_right > 1:
        tokens = tokens.repeat_interleave(num_right, dim=-1)
    if num_left > 1:
        tokens = tokens.expand(*tokens.shape[:-2], num_left, tokens.shape[-1])
    return tokens.flatten(-3, -2)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(-3, -2)
