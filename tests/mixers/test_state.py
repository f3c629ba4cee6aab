"""States are values: selecting, checking, and never changing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from statemix.harness.allowance import Reference
from statemix.mixers import AttentionState, StateError, StateMixerState

MIXERS: dict[str, dict[str, Any]] = {
    "state": {"type": "state", "transition": "gated_deltanet", "conv_size": 4},
    "attention": {"type": "attention", "num_heads": 2},
    "window": {"type": "attention", "num_heads": 2, "window": 4},
}


def expect_rows(mixer: nn.Module, hidden: Tensor, follow: Tensor, index: list[int]) -> None:
    """Rows picked from a state go on as they do in the whole batch, but for rounding.

    A product may add up another row, or as many rows as another batch has, in another order.
    """

    def outputs(mixer: nn.Module, hidden: Tensor, follow: Tensor) -> Tensor:
        return mixer(follow, mixer(hidden)[1])[0]

    whole, low = outputs(mixer, hidden, follow), outputs(copy.deepcopy(mixer).float(), hidden.float(), follow.float())
    assert not torch.equal(whole[0], whole[1])
    for given in (index, torch.tensor(index)):
        got = mixer(follow[index], mixer(hidden)[1].select(given))[0]
        assert Reference(whole[index], low[index]).excess(got) is None


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("index", [[1, 0, 2], [1, 1], [2], [0, 0, 1, 1, 2, 2]], ids=str)
@torch.no_grad()
def test_selected_rows_go_on_as_they_would_have(
    make_mixer: Callable[..., nn.Module], name: str, index: list[int]
) -> None:
    hidden, follow = (torch.randn(3, seq_len, 20, dtype=torch.float64) for seq_len in (9, 2))
    expect_rows(make_mixer(**MIXERS[name]), hidden, follow, index)


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_swapping_two_rows_swaps_what_follows(make_mixer: Callable[..., nn.Module], name: str) -> None:
    hidden, follow = (torch.randn(rows, seq_len, 20, dtype=torch.float64) for rows, seq_len in ((2, 9), (1, 1)))
    expect_rows(make_mixer(**MIXERS[name]), hidden, follow.expand(2, -1, -1), [1, 0])


@pytest.mark.parametrize("name", MIXERS)
def test_a_state_is_not_changed_by_use(make_mixer: Callable[..., nn.Module], name: str) -> None:
    mixer = make_mixer(**MIXERS[name])
    _, state = mixer(torch.randn(2, 9, 20, dtype=torch.float64))
    kept = copy.deepcopy({field: tensor.detach() for field, tensor in vars(state).items()})
    follow = torch.randn(2, 5, 20, dtype=torch.float64)

    def loop() -> list[Tensor]:
        current, outputs = state, []
        for t in range(5):
            output, current = mixer(follow[:, t : t + 1], current)
            outputs.append(output)
        return outputs

    assert all(torch.equal(one, other) for one, other in zip(loop(), loop(), strict=True))
    assert all(torch.equal(tensor, kept[field]) for field, tensor in vars(state).items())


def test_a_state_of_another_layer_or_batch_is_refused(make_mixer: Callable[..., nn.Module]) -> None:
    state_mixer, attention = make_mixer(**MIXERS["state"]), make_mixer(**MIXERS["attention"])
    hidden = torch.randn(2, 3, 20, dtype=torch.float64)
    (_, recurrent), (_, cache) = state_mixer(hidden), attention(hidden)
    with pytest.raises(StateError, match="expected StateMixerState, got AttentionState"):
        state_mixer(hidden, cache)
    with pytest.raises(StateError, match="expected AttentionState, got StateMixerState"):
        attention(hidden, recurrent)
    with pytest.raises(StateError, match=r"expected shape \[1, 4, 5, 6\], got \[2, 4, 5, 6\]"):
        state_mixer(hidden[:1], recurrent)
    with pytest.raises(StateError, match=r"expected shape \[3, any, 2, 10\], got \[2, 3, 2, 10\]"):
        attention(hidden[:1], cache, cu_seqlens=torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    assert isinstance(recurrent, StateMixerState) and isinstance(cache, AttentionState)


@pytest.mark.parametrize("name", MIXERS)
def test_packed_input_of_a_wrong_form_is_refused(make_mixer: Callable[..., nn.Module], name: str) -> None:
    mixer = make_mixer(**MIXERS[name])
    hidden = torch.randn(1, 6, 20, dtype=torch.float64)
    with pytest.raises(ValueError, match="cu_seqlens: expected a batch of 1 .* got batch 2"):
        mixer(hidden.expand(2, -1, -1), cu_seqlens=torch.tensor([0, 6], dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seqlens: expected int32"):
        mixer(hidden, cu_seqlens=torch.tensor([0, 6]))
    for offsets in ([1, 6], [0, 4, 3, 6], [0, 7]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            mixer(hidden, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
