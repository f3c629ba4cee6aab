"""States are values: selecting, checking, and never changing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from statemix.mixers import AttentionState, StateError, StateMixerState

MIXERS: dict[str, dict[str, Any]] = {
    "state": {"type": "state", "transition": "gated_deltanet", "conv_size": 4},
    "attention": {"type": "attention", "num_heads": 2},
    "window": {"type": "attention", "num_heads": 2, "window": 4},
}


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("index", [[1, 0, 2], [1, 1], [2], [0, 0, 1, 1, 2, 2]], ids=str)
def test_selected_rows_go_on_as_they_would_have(
    make_mixer: Callable[..., nn.Module], name: str, index: list[int]
) -> None:
    mixer = make_mixer(**MIXERS[name])
    _, state = mixer(torch.randn(3, 9, 20, dtype=torch.float64))
    follow = torch.randn(3, 2, 20, dtype=torch.float64)
    expected, _ = mixer(follow, state)
    for selected in (state.select(index), state.select(torch.tensor(index))):
        got, _ = mixer(follow[index], selected)
        # The batch size may change how matrix products are summed, hence not bitwise.
        torch.testing.assert_close(got, expected[index], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", MIXERS)
def test_swapping_two_rows_is_bitwise(make_mixer: Callable[..., nn.Module], name: str) -> None:
    mixer = make_mixer(**MIXERS[name])
    _, state = mixer(torch.randn(2, 9, 20, dtype=torch.float64))
    follow = torch.randn(1, 1, 20, dtype=torch.float64).expand(2, -1, -1)
    assert torch.equal(mixer(follow, state)[0].flip(0), mixer(follow, state.select([1, 0]))[0])


@pytest.mark.parametrize("name", MIXERS)
def test_a_state_is_not_changed_by_use(make_mixer: Callable[..., nn.Module], name: str) -> None:
    mixer = make_mixer(**MIXERS[name])
    _, state = mixer(torch.randn(2, 9, 20, dtype=torch.float64))
    kept = copy.deepcopy({field: tensor.detach() for field, tensor in vars(state).items()})
    follow = torch.randn(2, 5, 20, dtype=torch.float64)

    def loop() -> list[torch.Tensor]:
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
