"""Runs of tokens that one program works on: chunks, segments, whole sequences; packed documents included.

For packed documents the places are a table on the device. Lengths are never read on the host, so a GPU does not wait,
and the number of its rows is a bound that depends on sizes alone: those that are not needed are empty.

Shapes: B batch, T time, N documents, C chunk_size.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up. Triton's takes 3 to 5 microseconds, and a launch asks several times."""
    return -(-x // y)


def power_of_2_from(x: int) -> int:
    """The smallest power of two that is not below x."""
    return 1 << (x - 1).bit_length()


@dataclass(frozen=True)
class Spans:
    """Where the spans of a batch lie.

    Attributes:
        seq_len: T.
        length: the most tokens a span can have.
        per_sequence: spans of one sequence of a batch; meaningless for packed documents.
        count: how many there are, empty ones of a table included.
        table: None for a batch, else [count, 4] int32: first token, one past the last, first chunk, document.
        offsets: None for a batch, else [N + 1] int32: the spans of document n are offsets[n] to offsets[n + 1].
    """

    seq_len: int
    length: int
    per_sequence: int
    count: int
    table: Tensor | None = None
    offsets: Tensor | None = None

    def place(self, scale: float) -> tuple[Tensor | None, float, int, int]:
        """What kernels take after their tensors: table, the scale of read-outs, T, and spans a sequence."""
        return self.table, scale, self.seq_len, self.per_sequence

    def array_like(self, x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An array that a kernel fills span by span: zeros where micro-steps of no document are left out.

        Args:
            shape, dtype: in place of those of x.
        """
        make = x.new_empty if self.table is None else x.new_zeros
        return make(shape or x.shape, dtype=dtype or x.dtype)


def batch_spans(batch: int, seq_len: int, length: int) -> Spans:
    """Spans of ``length`` tokens of each sequence; the last one of a sequence may be shorter."""
    return Spans(seq_len, length, ceil_div(seq_len, length), num_spans(batch, seq_len, length))


def whole_sequences(batch: int, seq_len: int) -> Spans:
    """One span a sequence of a batch, also where none has a token."""
    return Spans(seq_len, max(seq_len, 1), 1, batch)


def num_spans(batch: int, seq_len: int, length: int, num_documents: int | None = None) -> int:
    """How many spans of ``length`` tokens there are: of a batch; of packed documents at most, however they lie."""
    return batch * ceil_div(seq_len, length) if num_documents is None else seq_len // length + num_documents


def packed_spans(cu_seqlens: Tensor, seq_len: int, length: int, chunk_size: int) -> Spans:
    """Spans of ``length`` tokens, a multiple of ``chunk_size``, of each document; an empty document has none."""
    num_documents = cu_seqlens.shape[0] - 1
    bound = num_spans(1, seq_len, length, num_documents)
    starts, lengths = _inside(cu_seqlens, seq_len)
    offsets, first_chunks = _offsets(lengths, length), _offsets(lengths, chunk_size)
    index = torch.arange(bound, device=cu_seqlens.device)
    document = torch.searchsorted(offsets[1:], index, right=True).clamp(max=num_documents - 1)
    within = index - offsets[document]
    start = starts[document] + within * length
    end = torch.minimum(start + length, starts[document] + lengths[document])
    first_chunk = first_chunks[document] + within * (length // chunk_size)
    table = torch.stack([start, torch.maximum(start, end), first_chunk, document], dim=1)
    table = table * (index < offsets[-1])[:, None]
    return Spans(seq_len, length, 0, bound, table.int(), offsets.int())


def whole_documents(cu_seqlens: Tensor, seq_len: int, chunk_size: int) -> Spans:
    """One span a document, empty documents included."""
    num_documents = cu_seqlens.shape[0] - 1
    starts, lengths = _inside(cu_seqlens, seq_len)
    document = torch.arange(num_documents, device=cu_seqlens.device)
    table = torch.stack([starts, starts + lengths, _offsets(lengths, chunk_size)[:-1], document], dim=1)
    return Spans(seq_len, seq_len, 0, num_documents, table.int())


@dataclass(frozen=True)
class Partition:
    """How the micro-steps of a scan are partitioned.

    Attributes:
        chunks: micro-steps that are turned into matrix products.
        sequences: those that a state passes through.
        segments: runs of chunks that start from a state of their own, or None where whole sequences fill the device.
    """

    chunks: Spans
    sequences: Spans
    segments: Spans | None


@dataclass(frozen=True)
class PartitionRule:
    """When sequences are split into segments, which have to be joined.

    Attributes:
        chunk_size: micro-steps a chunk.
        fill: programs that keep the device busy; a sequence gets as many segments as have room in that, rounded down.
        shortest: chunks of a segment at least.
        fewest: without room for so many segments a sequence nothing is split: joining them would cost more than idle
            multiprocessors. A short sequence may still have fewer.
    """

    chunk_size: int
    fill: int
    shortest: int
    fewest: int

    def segment_length(self, micro_steps: int, programs: int) -> int:
        """Micro-steps of a segment, a multiple of the chunk. Sizes may be symbolic.

        Args:
            programs: that scan all sequences side by side.
        """
        most = torch.sym_max(self.fill // torch.sym_max(programs, 1), 1)
        chunks = ceil_div(ceil_div(micro_steps, self.chunk_size), most)
        return torch.sym_max(chunks, self.shortest) * self.chunk_size

    def is_split(self, micro_steps: int, programs: int) -> bool:
        """There is room for the fewest segments, and a sequence is longer than one."""
        return self.segments(1, micro_steps, programs, None)[0] > 0

    def segments(self, batch: int, micro_steps: int, programs: int, num_documents: int | None) -> tuple[int, int]:
        """How many there are and the micro-steps of one, 0 and 0 where nothing ``is_split``.

        It is arithmetic, and sizes may be symbolic.

        Args:
            programs: that scan all sequences side by side.
        """
        length = self.segment_length(micro_steps, programs)
        has_room = torch.sym_min(self.fill // (self.fewest * torch.sym_max(programs, 1)), 1)
        is_longer = torch.sym_min(torch.sym_max(micro_steps - length, 0), 1)
        is_split = has_room * is_longer
        return is_split * num_spans(batch, micro_steps, length, num_documents), is_split * length


def partition(batch: int, micro_steps: int, offsets: Tensor | None, programs: int, rule: PartitionRule) -> Partition:
    """Chunks and, where sequences leave much of the device idle, segments.

    Args:
        offsets: of documents [N + 1] in micro-steps, with batch 1; or None.
        programs: that scan one sequence side by side.
    """
    if offsets is None:
        return _partition_batch(batch, micro_steps, programs, rule)
    sequences, size = whole_documents(offsets, micro_steps, rule.chunk_size), rule.chunk_size
    programs *= sequences.count
    segments = None
    if rule.is_split(micro_steps, programs):
        segments = packed_spans(offsets, micro_steps, rule.segment_length(micro_steps, programs), size)
    return Partition(packed_spans(offsets, micro_steps, size, size), sequences, segments)


@lru_cache(maxsize=1024)
def _partition_batch(batch: int, micro_steps: int, programs: int, rule: PartitionRule) -> Partition:
    """Made once for sizes that come again; packed documents have tables of their own in each call."""
    programs *= batch
    is_split, length = rule.is_split(micro_steps, programs), rule.segment_length(micro_steps, programs)
    segments = batch_spans(batch, micro_steps, length) if is_split else None
    return Partition(batch_spans(batch, micro_steps, rule.chunk_size), whole_sequences(batch, micro_steps), segments)


def _inside(cu_seqlens: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths [N] within the sequence, whatever the offsets hold: no kernel then leaves its tensors."""
    offsets = cu_seqlens.long().clamp(0, seq_len).cummax(0).values
    return offsets[:-1], offsets.diff()


def _offsets(lengths: Tensor, length: int) -> Tensor:
    """[N + 1]: how many spans of ``length`` tokens come before each document."""
    counts = (lengths + length - 1) // length
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
