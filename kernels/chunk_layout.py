"""Cutting sequences into chunks, packed documents included.

Chunks are stored time-major: first the first chunk of every sequence, then the second of those that have one, and so
on, longest sequences first. A walk over time then takes one slice a step and advances all sequences together.
A chunk never spans two documents; the places it has too many are zeros, which change no state.

Shapes: B batch, T time, N sequences (batch rows, or documents), X chunks, C chunk_size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class ChunkLayout:
    """Where each token of a batch lies among the chunks.

    Attributes:
        seq_len: T.
        chunk_size: C.
        active: how many sequences have a first, second, ... chunk; never increasing, sums to X.
        order: the sequences, longest first [N]; None for a batch of equal lengths.
        chunk_rows: for packed documents, the row of each place in the chunks [X * C]; T means a place left empty.
        token_rows: for packed documents, the place of each token [T]; X * C means a token of no document.
    """

    seq_len: int
    chunk_size: int
    active: tuple[int, ...]
    order: Tensor | None = None
    chunk_rows: Tensor | None = None
    token_rows: Tensor | None = None

    def split(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [X, C, ...]."""
        if self.chunk_rows is not None:
            return _take_rows(x.squeeze(0), self.chunk_rows).unflatten(0, (-1, self.chunk_size))
        missing = len(self.active) * self.chunk_size - self.seq_len
        padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else x
        return padded.unflatten(1, (-1, self.chunk_size)).transpose(0, 1).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """[X, C, ...] -> [B, T, ...], the inverse of ``split``; tokens of no document become zeros."""
        if self.token_rows is not None:
            return _take_rows(x.flatten(0, 1), self.token_rows).unsqueeze(0)
        return x.unflatten(0, (len(self.active), -1)).transpose(0, 1).flatten(1, 2)[:, : self.seq_len]


def batch_layout(batch: int, seq_len: int, chunk_size: int) -> ChunkLayout:
    """Chunks of a batch of equally long sequences."""
    return ChunkLayout(seq_len, chunk_size, (batch,) * -(-seq_len // chunk_size))


def packed_layout(cu_seqlens: Tensor, seq_len: int, chunk_size: int) -> ChunkLayout:
    """Chunks of packed documents with offsets cu_seqlens [N + 1]; documents may be empty."""
    offsets = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    num_chunks = [-(-lengths[n] // chunk_size) for n in order]
    active = tuple(sum(c > step for c in num_chunks) for step in range(max(num_chunks, default=0)))

    longest_first = torch.tensor(order, device=cu_seqlens.device)
    starts, ends = cu_seqlens.long()[longest_first], cu_seqlens.long()[longest_first + 1]
    within = torch.arange(chunk_size, device=cu_seqlens.device)
    rows = [(starts[:m] + step * chunk_size)[:, None] + within for step, m in enumerate(active)]
    limits = [ends[:m, None].expand(-1, chunk_size) for m in active]
    chunk_rows = torch.cat([r.flatten() for r in rows]) if rows else starts[:0]
    taken = chunk_rows < (torch.cat([x.flatten() for x in limits]) if rows else starts[:0])
    chunk_rows = torch.where(taken, chunk_rows, seq_len)
    token_rows = torch.full((seq_len + 1,), chunk_rows.numel(), device=cu_seqlens.device)
    token_rows[chunk_rows] = torch.arange(chunk_rows.numel(), device=cu_seqlens.device)
    return ChunkLayout(seq_len, chunk_size, active, longest_first, chunk_rows, token_rows[:seq_len])


def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x [R, ...]; row R, one past the end, is zero, whatever lies behind x in memory."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])]).index_select(0, rows)
