"""Streams of tokens: which windows are drawn, and what is refused."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from statemix.plugins import PartConfig
from statemix.tasks import Split, TokenStream


class Given(TokenStream):
    """A task whose streams are given."""

    class Config(PartConfig):
        type: Literal["given"] = "given"

    def __init__(self, train: Tensor, heldout: Tensor, *, vocab_size: int = 256, seed: int = 0) -> None:
        super().__init__(Given.Config(), vocab_size=vocab_size, seq_len=17, seed=seed)
        self.given = Split(train, heldout)

    def read(self) -> Split:
        return self.given


def test_labels_are_the_next_tokens() -> None:
    task = Given(torch.arange(200, dtype=torch.uint8), torch.arange(200, dtype=torch.uint8))
    for batch in (task.train_batch(1, 5), *task.heldout_batches(2, 3)):
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        assert torch.equal(batch.labels, batch.tokens + 1)


def test_every_window_of_the_stream_can_be_drawn_and_none_beyond_it() -> None:
    task = Given(torch.arange(21, dtype=torch.uint8), torch.zeros(18, dtype=torch.uint8))
    starts = task.train_batch(1, 500).tokens[:, 0].unique().tolist()
    assert starts == [0, 1, 2, 3]  # 21 tokens hold 4 windows of 17 + 1


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    stream = torch.arange(2000) % 251
    task = Given(stream, stream)
    first = task.train_batch(4, 3)
    task.train_batch(5, 3)
    torch.manual_seed(99)
    assert torch.equal(first.tokens, Given(stream, stream).train_batch(4, 3).tokens)
    assert not torch.equal(first.tokens, task.train_batch(5, 3).tokens)
    assert not torch.equal(first.tokens, Given(stream, stream, seed=1).train_batch(4, 3).tokens)


@pytest.mark.parametrize("num_tokens", [18, 34, 35, 36, 1000])  # one window; just below, at and above two; many
def test_heldout_windows_do_not_overlap_and_reach_both_ends(num_tokens: int) -> None:
    stream = (torch.arange(num_tokens) % 256).to(torch.uint8)
    batches = list(Given(stream, stream).heldout_batches(4, 3))
    first_labels = torch.cat([batch.labels[:, 0] for batch in batches])
    assert len(first_labels) == min(12, (num_tokens - 1) // 17)
    gaps = first_labels.diff() % 256
    assert bool((gaps >= 17).all())
    if len(first_labels) > 1:
        assert int(batches[-1].labels[-1, -1]) == (num_tokens - 1) % 256


@pytest.mark.parametrize(
    ("train", "heldout", "message"),
    [
        (torch.arange(17), torch.arange(18), r"training\.seq_len: expected less than .* 17, .* 18, got 17"),
        (torch.arange(18), torch.arange(0), r"training\.seq_len: expected less than .* 18, .* 0, got 17"),
        (torch.arange(18), torch.arange(-1, 20), r"training\.task: expected tokens from 0 up, got -1"),
        (torch.arange(18), torch.arange(40), r"model\.vocab_size: expected 40 or more for task given .*got 30"),
    ],
)
def test_a_stream_that_does_not_fit_is_refused_by_name(train: Tensor, heldout: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Given(train, heldout, vocab_size=30).fingerprint()


def test_the_fingerprint_is_that_of_both_streams() -> None:
    a, b = torch.arange(50), torch.arange(50).flip(0)
    assert Given(a, b).fingerprint() == Given(a, b, seed=1).fingerprint() != Given(a, a).fingerprint()
