"""When sequences are cut into segments, and that what is allocated for segments is as much as there are."""

from itertools import product

import pytest
import torch

from statemix.kernels.spans import CutRule, cut_rows, num_spans

RULE = CutRule(chunk_size=64, fill=256, shortest=8, fewest=3)


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
    cut = cut_rows(1, rows, None, programs, RULE)
    assert cut.segments is not None and cut.segments.length == cut.segment_length == length
    assert cut.segments.count == -(-rows // length) and cut.segments.count * programs <= RULE.fill


@pytest.mark.parametrize(
    ("rows", "programs"),
    [(32768, 86), (32768, 256), (32768, 1000), (512, 1), (1, 1)],
    ids=["two segments would not pay", "full", "more than full", "eight chunks", "one row"],
)
def test_others_stay_whole(rows: int, programs: int) -> None:
    assert cut_rows(1, rows, None, programs, RULE).segments is None


def test_a_batch_fills_the_device_as_heads_do() -> None:
    assert cut_rows(8, 32768, None, 32, RULE).segments is None
    few = cut_rows(2, 32768, None, 32, RULE).segments
    assert few is not None and (few.per_sequence, few.count) == (4, 8)


@pytest.mark.parametrize(("batch", "rows", "documents"), [*product((1, 3), (1, 700, 4096), (None,)), (1, 4096, 4)])
def test_there_are_as_many_segments_as_num_spans_says(batch: int, rows: int, documents: int | None) -> None:
    offsets = None if documents is None else torch.linspace(0, rows, documents + 1).int()
    cut = cut_rows(batch, rows, offsets, 2, RULE)
    count = num_spans(batch, rows, cut.segment_length, documents)
    assert count >= (cut.sequences if cut.segments is None else cut.segments).count
    assert cut.segments is None or count == cut.segments.count
