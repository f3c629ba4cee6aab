"""The parity task: right labels, at the lengths that are asked, from streams that share nothing."""

from collections.abc import Callable

import pytest
import torch

from statemix.recipes import Recipe
from statemix.tasks import IGNORE, Parity


def make(seed: int = 0) -> Parity:
    return Parity(Parity.Config(min_len=3, heldout_len=25), vocab_size=2, seq_len=11, seed=seed)


def test_a_label_says_whether_the_number_of_ones_so_far_is_odd() -> None:
    [heldout] = make().heldout_batches(1, 5)
    for batch in (make().train_batch(1, 5), heldout):
        for row, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
            for t, label in enumerate(labels):
                assert label == IGNORE or label == sum(row[: t + 1]) % 2


def test_training_asks_for_short_lengths_and_scoring_for_longer_ones() -> None:
    task = make()
    [heldout] = task.heldout_batches(1, 5)
    for batch, first, last in ((task.train_batch(1, 5), 3, 11), (heldout, 12, 25)):
        asked = (batch.labels != IGNORE).all(dim=0).nonzero().flatten() + 1
        assert asked.tolist() == list(range(first, last + 1))
        assert batch.tokens.shape == (5, last)


def test_batches_follow_from_seed_stream_and_step_alone() -> None:
    task = make()
    assert torch.equal(task.train_batch(2, 64).tokens, make().train_batch(2, 64).tokens)
    for other in (task.train_batch(3, 64), make(seed=1).train_batch(2, 64), *task.heldout_batches(1, 64)):
        assert not torch.equal(task.train_batch(2, 64).tokens, other.tokens[:, :11])
    assert make().fingerprint() == task.fingerprint() != make(seed=1).fingerprint()


def test_a_recipe_names_it_and_is_told_which_lengths_do_not_go_together(make_recipe: Callable[..., Recipe]) -> None:
    task = make_recipe("training.task=parity", "model.vocab_size=2", "training.seq_len=7").build_task()
    [heldout] = task.heldout_batches(1, 4)
    assert heldout.tokens.shape == (4, 14)  # twice as long, as no length is given
    for change, message in (
        ("{type: parity, min_len: 8}", r"task\.min_len: expected at most seq_len = 7, got 8"),
        ("{type: parity, heldout_len: 7}", r"task\.heldout_len: expected more than seq_len = 7, got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            make_recipe(f"training.task={change}", "training.seq_len=7")
    with pytest.raises(ValueError, match=r"model\.vocab_size: expected 2 or more for task parity"):
        make_recipe("training.task=parity", "model.vocab_size=1")
