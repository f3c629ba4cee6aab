"""Sampling: greedy equals recomputing everything, prompts may be padded, randomness has one source."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from statemix.blocks import CausalLM, generate

Make = Callable[..., CausalLM]


@torch.no_grad()
def greedy(model: CausalLM, tokens: Tensor, count: int) -> Tensor:
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("prompt", [1, 2, 3, 11])
def test_greedy_equals_the_likeliest_token_of_full_forwards(make_lively_model: Make, prompt: int) -> None:
    """Prompts shorter than the convolution included."""
    model, tokens = make_lively_model(), torch.randint(23, (2, prompt))
    assert torch.equal(generate(model, tokens, max_new_tokens=12, temperature=0), greedy(model, tokens, 12))


def test_padded_prompts_go_on_as_they_would_alone(make_lively_model: Make) -> None:
    model, tokens = make_lively_model(), torch.randint(23, (3, 6))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0]]).bool()
    got = generate(model, tokens, max_new_tokens=8, temperature=0, mask=mask)
    for row in range(3):
        prompt = tokens[row][mask[row]][None]
        assert torch.equal(got[row, 6:], greedy(model, prompt, 8)[0, prompt.shape[1] :])


def test_the_generator_alone_decides_what_is_sampled(make_lively_model: Make) -> None:
    model, tokens = make_lively_model(), torch.randint(23, (2, 4))

    def sample(seed: int) -> Tensor:
        return generate(model, tokens, max_new_tokens=10, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_top_k_samples_among_the_likeliest_only(make_lively_model: Make) -> None:
    model, tokens = make_lively_model(), torch.randint(23, (1, 5)).expand(200, -1)
    likeliest = model(tokens[:1])[0][0, -1].topk(3).indices
    drawn = generate(model, tokens, max_new_tokens=1, temperature=5.0, top_k=3)[:, -1]
    assert set(drawn.tolist()) == set(likeliest.tolist())
    assert torch.equal(generate(model, tokens[:1], max_new_tokens=4, top_k=1), greedy(model, tokens[:1], 4))


def test_a_low_temperature_draws_what_greedy_takes(make_lively_model: Make) -> None:
    model, tokens = make_lively_model(), torch.randint(23, (2, 5))
    assert torch.equal(generate(model, tokens, max_new_tokens=5, temperature=1e-6), greedy(model, tokens, 5))


def test_no_new_tokens_gives_the_prompt_back(make_lively_model: Make) -> None:
    tokens = torch.randint(23, (2, 5))
    assert torch.equal(generate(make_lively_model(), tokens, max_new_tokens=0), tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens: expected 0 or more, got -1"),
        ({"temperature": -0.5}, "temperature: expected a number from 0 up, got -0.5"),
        ({"top_k": 0}, "top_k: expected 1 or more, got 0"),
        ({"mask": torch.tensor([[True, True], [False, False]])}, r"none in rows \[1\]"),
    ],
)
def test_impossible_requests_are_refused(make_lively_model: Make, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(make_lively_model(), torch.randint(23, (2, 2)), **{"max_new_tokens": 3, **options})
