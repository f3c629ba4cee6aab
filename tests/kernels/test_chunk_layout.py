"""Cutting into chunks and joining again loses nothing and invents nothing."""

import pytest
import torch

from statemix.kernels.chunk_layout import batch_layout, packed_layout


@pytest.mark.parametrize("seq_len", [1, 15, 16, 17, 40])
def test_joining_the_chunks_of_a_batch_gives_it_back(seq_len: int) -> None:
    layout, x = batch_layout(3, seq_len, 16), torch.randn(3, seq_len, 2, 5)
    chunks = layout.split(x)
    assert chunks.shape[0] == sum(layout.active) and chunks.abs().sum() == pytest.approx(x.abs().sum())
    assert torch.equal(layout.join(chunks), x)


@pytest.mark.parametrize("offsets", [[0, 40], [0, 0, 5, 5, 40], [0, 16, 33, 37], [0, 0], [0, 3, 3]])
def test_joining_the_chunks_of_documents_gives_them_back_and_zeros_after_the_last(offsets: list[int]) -> None:
    layout, x = packed_layout(torch.tensor(offsets, dtype=torch.int32), 40, 16), torch.randn(1, 40, 2, 5)
    expected = x.clone()
    expected[:, offsets[-1] :] = 0
    assert torch.equal(layout.join(layout.split(x)), expected)


def test_chunks_of_documents_come_in_order_of_time_longest_documents_first() -> None:
    layout = packed_layout(torch.tensor([0, 5, 45, 45, 62], dtype=torch.int32), 62, 16)
    assert layout.active == (3, 2, 1)
    assert layout.order is not None and layout.order.tolist() == [1, 3, 0, 2]


def test_what_lies_between_documents_and_chunks_is_never_read() -> None:
    layout = packed_layout(torch.tensor([0, 5, 20], dtype=torch.int32), 32, 16)
    x = torch.full((1, 32, 1), torch.nan)
    x[:, :20] = 1.0
    assert layout.split(x).nansum() == 20 and bool(layout.split(x).isfinite().all())
