"""MQAR: the form of a sample, its distribution, and what a perfect and a random model score."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from statemix.recipes import Recipe
from statemix.tasks import IGNORE, Batch, Mqar
from statemix.training.objective import evaluate

SETTINGS: dict[str, Any] = {
    "num_pairs": 5,
    "power": 0.01,
    "random_non_queries": True,
    "vocab_size": 64,
    "seq_len": 43,  # odd, and not 4 * num_pairs
    "seed": 0,
}


class Oracle(nn.Module):
    """Answers every token with the value that followed it in the context."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        keys, values = tokens[:, 0:10:2], tokens[:, 1:10:2]
        matches = (tokens[:, :, None] == keys[:, None, :]).double()
        return matches @ nn.functional.one_hot(values, 64).double(), None


class Guess(nn.Module):
    """Random logits over the values."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        logits = torch.rand(*tokens.shape, 64, generator=torch.Generator().manual_seed(0))
        logits[..., :32] = -1
        return logits, None


def make(**changes: Any) -> Mqar:
    settings = {**SETTINGS, **changes}
    sizes = {name: settings.pop(name) for name in ("vocab_size", "seq_len", "seed")}
    return Mqar(Mqar.Config(**settings), **sizes)


def draw(**changes: Any) -> Batch:
    return make(**changes).train_batch(1, 50)


def test_a_perfect_oracle_scores_one_and_a_random_one_chance() -> None:
    batches = list(make().heldout_batches(4, 50))
    assert evaluate(Oracle(), batches, device=torch.device("cpu")).accuracy == 1.0
    guessed = evaluate(Guess(), batches, device=torch.device("cpu"))
    assert guessed.num_valid == 4 * 50 * 5
    # 1000 questions with chance 1/32: 31 right answers expected, standard deviation 5.5; 4 of those each way.
    assert abs(guessed.accuracy - 1 / 32) < 0.022


def test_pairs_come_first_and_each_is_asked_once_at_an_even_offset() -> None:
    tokens, labels = draw()
    keys, values = tokens[:, 0:10:2], tokens[:, 1:10:2]
    assert bool(((keys >= 1) & (keys < 32)).all())
    assert bool(((values >= 32) & (values < 64)).all())
    for row in range(50):
        assert len(keys[row].unique()) == len(values[row].unique()) == 5
        asked = (labels[row] != IGNORE).nonzero().flatten()
        assert bool((asked >= 10).all()) and bool((asked % 2 == 0).all())
        answers = dict(zip(keys[row].tolist(), values[row].tolist(), strict=True))
        assert [answers[token] for token in tokens[row, asked].tolist()] == labels[row, asked].tolist()


def test_labels_are_not_the_inputs() -> None:
    tokens, labels = draw()
    assert not bool((tokens == labels).any())
    shifted = labels[:, :-1][labels[:, :-1] != IGNORE] == tokens[:, 1:][labels[:, :-1] != IGNORE]
    assert shifted.double().mean() < 0.2  # nor, but by chance, the next inputs


def test_places_between_questions_are_random_or_zero() -> None:
    random, zeros = draw(), draw(random_non_queries=False)
    between = torch.ones(50, 43, dtype=torch.bool)
    between[:, :10] = False
    assert bool((zeros.tokens[between & (zeros.labels == IGNORE)] == 0).all())
    assert len(random.tokens[between & (random.labels == IGNORE)].unique()) > 50


def test_gaps_follow_the_power_law() -> None:
    labels = make(num_pairs=1, seq_len=10).train_batch(1, 20000).labels
    gaps = ((labels != IGNORE).int().argmax(1) - 2) // 2
    weights = torch.arange(1, 5).double() ** (0.01 - 1)
    observed = torch.bincount(gaps, minlength=4).double() / 20000
    # 20000 draws: a standard deviation of at most 0.0036 for each share; 4 of those.
    assert (observed - weights / weights.sum()).abs().max() < 0.015


@pytest.mark.parametrize(
    "change",
    [{"num_pairs": 4}, {"power": 2.0}, {"random_non_queries": False}, {"vocab_size": 66}, {"seq_len": 45}, {"seed": 1}],
)
def test_every_setting_changes_the_data_and_the_fingerprint(change: dict[str, Any]) -> None:
    before, after = draw(), draw(**change)
    assert before.tokens.shape != after.tokens.shape or not torch.equal(before.tokens, after.tokens)
    assert make().fingerprint() != make(**change).fingerprint()


def test_samples_are_fresh_at_every_step_and_never_the_held_out_ones() -> None:
    task = make()
    heldout = torch.cat([batch.tokens for batch in task.heldout_batches(3, 50)])
    train = torch.cat([task.train_batch(step, 50).tokens for step in range(4)])
    assert len(torch.cat([train, heldout]).unique(dim=0)) == 350
    assert torch.equal(task.train_batch(2, 50).tokens, make().train_batch(2, 50).tokens)


@pytest.mark.parametrize("vocab_size", [12, 13])  # the fewest tokens with five keys and five values; an odd number
def test_the_smallest_sizes_that_a_recipe_allows_hold_every_question(
    vocab_size: int, make_recipe: Callable[..., Recipe]
) -> None:
    sizes = (f"model.vocab_size={vocab_size}", "training.task={type: mqar, num_pairs: 5}")
    task = make_recipe(*sizes, "training.seq_len=20").build_task()
    for batch in (task.train_batch(1, 50), *task.heldout_batches(1, 50)):
        assert bool(((batch.labels != IGNORE).sum(1) == 5).all())
        assert int(batch.tokens.max()) < vocab_size
    with pytest.raises(ValueError, match=r"task\.num_pairs: .*seq_len / 4 = 4, got 5"):
        make_recipe(*sizes, "training.seq_len=19")
    with pytest.raises(ValueError, match=r"model\.vocab_size: expected 12 or more"):
        make_recipe(*sizes, "training.seq_len=20", "model.vocab_size=11")
