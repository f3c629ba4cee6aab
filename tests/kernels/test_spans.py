"""When sequences are cut into segments, and that what is allocated for segments is as much as there are."""

import pytest
import torch

from statemix.kernels.spans import PartitionRule, partition

RULE = PartitionRule(chunk_size=64, fill=256, shortest=8, fewest=3)


@pytest.mark.parametrize(
    ("rows", "programs", "length"),
    [
        (32768, 32, 4096),  # eight segments of 32 programs
        (32768, 64, 8192),
        (32768, 33, 4736),  # no more than fit: seven, of 74 chunks
        (700, 1, 512),  # eight chunks at least
    ],
)
def test_as_many_segments_as_there_is_room_for(rows: int, programs: int, length: int) -> None:
    parts = partition(1, rows, None, programs, RULE)
    assert parts.segments is not None and parts.segments.length == length
    assert parts.segments.count == -(-rows // length) and parts.segments.count * programs <= RULE.fill


@pytest.mark.parametrize(
    ("rows", "programs"),
    [(32768, 86), (32768, 256), (32768, 1000), (512, 1), (1, 1)],
    ids=["two segments would not pay", "full", "more than full", "eight chunks", "one micro-step"],
)
def test_others_stay_whole(rows: int, programs: int) -> None:
    assert partition(1, rows, None, programs, RULE).segments is None


def test_a_batch_fills_the_device_as_heads_do() -> None:
    assert partition(8, 32768, None, 32, RULE).segments is None
    few = partition(2, 32768, None, 32, RULE).segments
    assert few is not None and (few.per_sequence, few.count) == (4, 8)


@pytest.mark.parametrize("programs", [1, 32, 85])
@pytest.mark.parametrize(("batch", "rows", "documents"), [(1, 19, None), (1, 700, None), (3, 4096, None), (1, 4096, 2)])
def test_there_is_room_for_all_segments_and_no_more(
    programs: int, batch: int, rows: int, documents: int | None
) -> None:
    offsets = None if documents is None else torch.linspace(0, rows, documents + 1).int()
    parts, count = partition(batch, rows, offsets, programs, RULE), batch if documents is None else documents
    kept = RULE.segments(batch, rows, programs * count, documents)
    assert kept == ((0, 0) if parts.segments is None else (parts.segments.count, parts.segments.length))


def test_no_room_is_kept_where_sequences_fill_the_device_or_nearly() -> None:
    assert RULE.segments(256, 64, 256 * 32, None) == RULE.segments(1, 32768, 86, None) == (0, 0)
    assert RULE.segments(1, 32768, 1000 * 32, 1000) == (0, 0)
