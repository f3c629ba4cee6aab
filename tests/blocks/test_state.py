"""A model in one call or in many, with its state passed along, selected and checked."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from statemix.blocks import CausalLM, ModelState
from statemix.harness.allowance import Reference
from statemix.mixers import StateError, StateMixerState

STACKS = ["hybrid", "only_state", "only_attention"]
TOLERANCE = 1e-11  # float64 sums of a few hundred terms of size one, in another order
Make = Callable[..., CausalLM]


def run(model: CausalLM, tokens: Tensor, sizes: list[int]) -> tuple[Tensor, ModelState]:
    state, parts = None, []
    for part in tokens.split(sizes, dim=1):
        logits, state = model(part, state)
        parts.append(logits)
    return torch.cat(parts, dim=1), state


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("sizes", [[63, 64, 33], [1] * 160, [1, 159], [4] * 40, [10, 3]], ids=lambda s: str(s)[:12])
@torch.no_grad()
def test_any_split_equals_one_call(make_lively_model: Make, stack: str, sizes: list[int]) -> None:
    model = make_lively_model(stack)
    tokens = torch.randint(23, (2, sum(sizes)))
    torch.testing.assert_close(run(model, tokens, sizes)[0], model(tokens)[0], rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_three_tokens_at_once_equal_three_calls(make_lively_model: Make) -> None:
    model = make_lively_model()
    tokens = torch.randint(23, (2, 13))
    at_once, one_by_one = run(model, tokens, [10, 3]), run(model, tokens, [10, 1, 1, 1])
    torch.testing.assert_close(at_once[0], one_by_one[0], rtol=0, atol=TOLERANCE)
    follow = torch.randint(23, (2, 4))
    logits = [model(follow, state)[0] for _, state in (at_once, one_by_one)]
    torch.testing.assert_close(*logits, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("stack", STACKS)
@torch.no_grad()
def test_swapping_the_rows_of_a_state_swaps_the_next_logits(make_lively_model: Make, stack: str) -> None:
    """But for rounding: a product may add up another row, or as many rows as another batch has, in another order."""
    model, prompt, token = make_lively_model(stack), torch.randint(23, (2, 9)), torch.tensor([[7]])

    def follow(model: CausalLM, rows: list[int]) -> Tensor:
        return model(token.expand(len(rows), -1), model(prompt)[1].select(rows))[0]

    logits, low = follow(model, [0, 1]), follow(copy.deepcopy(model).float(), [0, 1])
    assert not torch.equal(logits[0], logits[1])
    for rows in ([1, 0], [1, 1], [1], [0, 1, 0, 1]):
        assert Reference(logits[rows], low[rows]).excess(follow(model, rows)) is None, rows


@torch.no_grad()
def test_going_back_to_a_kept_state_undoes_rejected_tokens(make_lively_model: Make) -> None:
    model = make_lively_model()
    _, kept = model(torch.randint(23, (1, 9)))
    draft = torch.randint(23, (1, 5))
    first, _ = model(draft, kept)
    _, accepted = model(draft[:, :2], kept)
    torch.testing.assert_close(model(draft[:, 2:], accepted)[0], first[:, 2:], rtol=0, atol=TOLERANCE)
    assert torch.equal(model(draft, kept)[0], first)


@torch.no_grad()
def test_a_prompt_of_one_token_gives_the_same_bits_every_time(make_lively_model: Make) -> None:
    model = make_lively_model()
    tokens = torch.tensor([[5]])
    first = model(tokens)[0]
    for _ in range(20):
        torch.full((5000,), torch.nan)  # memory that a buffer never written would show
        assert torch.equal(model(tokens)[0], first)


@pytest.mark.parametrize("stack", STACKS)
@torch.no_grad()
def test_no_logit_depends_on_a_later_token(make_lively_model: Make, stack: str) -> None:
    model = make_lively_model(stack)
    tokens = torch.randint(23, (1, 90))
    changed = tokens.clone()
    changed[:, 71:] = (changed[:, 71:] + 1) % 23
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:, :71], after[:, :71])  # bits, since shapes and places are the same
    assert not torch.equal(before[:, 71], after[:, 71])


def test_states_of_other_models_are_refused(make_model: Make) -> None:
    model, other = make_model("hybrid"), make_model("only_state")
    tokens = torch.randint(23, (2, 3))
    _, state = model(tokens)
    with pytest.raises(StateError, match="expected 4 layers, got 2"):
        model(tokens, other(tokens)[1])
    with pytest.raises(StateError, match="expected ModelState, got tuple"):
        model(tokens, state.layers)
    with pytest.raises(StateError, match=r"expected shape \[3, 4, 5, 6\], got \[2, 4, 5, 6\]"):
        model(torch.randint(23, (3, 1)), state)
    with pytest.raises(StateError, match="expected StateMixerState, got AttentionState"):
        model(tokens, ModelState(state.layers[::-1]))


@pytest.mark.parametrize("tokens", [torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3), torch.zeros(1, 0).long()])
def test_tokens_of_a_wrong_form_are_refused(make_model: Make, tokens: Tensor) -> None:
    with pytest.raises(ValueError, match="tokens: expected int64"):
        make_model("only_attention")(tokens)


def test_rows_are_selected_by_number_or_by_a_mask_and_nothing_else() -> None:
    state = StateMixerState(torch.randn(3, 1, 2, 2), torch.randn(3, 0, 4), torch.zeros(3, 0, dtype=torch.int64))
    assert torch.equal(state.select([False, False, True]).recurrent, state.recurrent[2:])
    assert torch.equal(state.select(torch.tensor([True, False, True])).recurrent, state.recurrent[[0, 2]])
    assert state.select([]).recurrent.shape[0] == 0
    for index in ([3], [-1], [[0]], [0.5], [True, False]):
        with pytest.raises(StateError, match="index: expected rows from 0 to 2, or a mask of 3 bools"):
            state.select(index)  # type: ignore[arg-type]
