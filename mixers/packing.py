"""Packed documents: several sequences laid end to end in one row, document n at cu_seqlens[n] : cu_seqlens[n + 1].

Documents may be empty, and rows after cu_seqlens[-1] belong to none. A state has one row a document.
"""

import torch
from torch import Tensor


def num_sequences(hidden: Tensor, cu_seqlens: Tensor | None) -> int:
    """Rows that a state must have for ``hidden`` [B, T, ...]: B, or the number of packed documents.

    Raises:
        ValueError: cu_seqlens that is not int32 [N + 1], whose offsets are out of order (read on the CPU only), or a
            batch other than 1 beside it.
    """
    if cu_seqlens is None:
        return hidden.shape[0]
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens: expected int32 [num_documents + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}; "
            "give the offset of every document and then the end of the last one"
        )
    if hidden.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens: expected a batch of 1 row that holds all documents, got batch {hidden.shape[0]}; "
            "lay the rows end to end, or leave cu_seqlens out"
        )
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():  # reading them would stall a GPU
        document_bounds(cu_seqlens, seq_len=hidden.shape[1])
    return len(cu_seqlens) - 1


def document_bounds(cu_seqlens: Tensor, *, seq_len: int) -> list[tuple[int, int]]:
    """(start, stop) of each document. Reads the offsets, hence waits for the device.

    Raises:
        ValueError: offsets that do not start at 0, decrease, or leave the row.
    """
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] > seq_len or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens: expected offsets that start at 0 and rise to at most seq_len {seq_len}, got {offsets}; "
            "give the offset of every document and then the end of the last one"
        )
    return list(zip(offsets, offsets[1:], strict=False))


def positions(seen: Tensor, *, seq_len: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where each token stands in its own sequence, after the tokens that came in earlier calls.

    Args:
        seen: tokens of earlier calls, [B] or [N] int64.
        seq_len: new tokens of the row.
        cu_seqlens: offsets of packed documents, int32 [N + 1]; each counts for itself.

    Returns:
        positions [B, T], anything after the last document, and what ``seen`` is now.
    """
    token = torch.arange(seq_len, device=seen.device)
    if cu_seqlens is None:
        return seen[:, None] + token, seen + seq_len
    starts, stops = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    # The number of documents that ended at or before a token, empty ones included, is the index of its own.
    document = torch.searchsorted(stops, token, right=True).clamp(max=len(stops) - 1)
    return ((seen - starts)[document] + token)[None], seen + stops - starts


def without_rest(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """``x`` [1, T, ...] with zeros after the last document."""
    if cu_seqlens is None:
        return x
    is_rest = torch.arange(x.shape[1], device=x.device) >= cu_seqlens[-1]
    return x.masked_fill(is_rest.view(-1, *[1] * (x.ndim - 2)), 0)


class HistoryLayout:
    """Where things lie when ``size`` earlier places are put in front of every packed document.

    The stretched row has seq_len + N * size places, and a filter of width size + 1 that runs over it without
    padding can not reach from one document into another.

    Attributes:
        seq_len: places of the stretched row.
        history: place of each earlier entry, [N * size].
        tokens: place of each token, [seq_len]; tokens after the last document follow it.
        last: the last ``size`` places of each document, earlier entries included, [N, size].
    """

    def __init__(self, cu_seqlens: Tensor, *, seq_len: int, size: int) -> None:
        starts, stops = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        shift = size * torch.arange(len(starts), device=cu_seqlens.device)
        places = torch.arange(size, device=cu_seqlens.device)
        token = torch.arange(seq_len, device=cu_seqlens.device)
        self.seq_len = seq_len + size * len(starts)
        self.history = ((starts + shift)[:, None] + places).flatten()
        # The number of documents that started at or before a token, empty ones included, is the number of gaps.
        self.tokens = token + size * torch.searchsorted(starts, token, right=True)
        self.last = (stops + shift)[:, None] + places
