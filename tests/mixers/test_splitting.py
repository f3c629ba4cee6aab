"""A sequence in one call, or in any number of calls with the state handed over: the same outputs and state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from statemix.transitions import transition_names

TOLERANCE = 1e-11  # float64 sums of a few hundred terms of size one, in another order

EXTRA: dict[str, Any] = {
    "two_writes_reflecting": ["scalar_gate", {"type": "householder", "count": 2, "max_beta": 2}],
    "own_direction": {"type": "householder", "direction": "projection"},
    "two_blocks": {"type": "block_diagonal", "inner": "householder", "blocks": 2},
}
TRANSITIONS: dict[str, Any] = {name: name for name in transition_names() if name != "block_diagonal"} | EXTRA

MIXERS: dict[str, dict[str, Any]] = {
    name: {"type": "state", "transition": transition, "conv_size": 4, "conv_bias": True, "output_gate": "silu"}
    for name, transition in TRANSITIONS.items()
}
MIXERS["no_convolution"] = {"type": "state", "transition": "gated_deltanet", "output_norm": "none"}
MIXERS["full_attention"] = {"type": "attention", "num_heads": 2, "num_kv_heads": 1}
MIXERS["window_attention"] = {"type": "attention", "num_heads": 2, "window": 7}
MIXERS["window_of_one"] = {"type": "attention", "num_heads": 2, "window": 1}
MIXERS["wide_window_without_rotary"] = {"type": "attention", "num_heads": 2, "window": 100, "rotary": False}


def run(mixer: nn.Module, hidden: Tensor, sizes: list[int]) -> tuple[Tensor, Any]:
    state, outputs = None, []
    for part in hidden.split(sizes, dim=1):
        output, state = mixer(part, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


def tensors(state: Any) -> dict[str, Tensor]:
    return vars(state)


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("sizes", [[63, 64, 33], [1] * 19, [1, 40], [10, 3], [2, 1, 1, 20]], ids=str)
def test_splitting_a_sequence_changes_nothing(
    make_mixer: Callable[..., nn.Module], name: str, sizes: list[int]
) -> None:
    mixer = make_mixer(**MIXERS[name])
    hidden = torch.randn(2, sum(sizes), 20, dtype=torch.float64)
    with torch.no_grad():
        whole, end = mixer(hidden)
        output, state = run(mixer, hidden, sizes)
    torch.testing.assert_close(output, whole, rtol=0, atol=TOLERANCE)
    for field, tensor in tensors(end).items():
        torch.testing.assert_close(tensors(state)[field], tensor, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MIXERS)
def test_declared_state_bytes_are_those_of_the_real_state(make_mixer: Callable[..., nn.Module], name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        mixer = make_mixer(**MIXERS[name]).to(dtype)
        for seq_len in (1, 5, 13):
            _, state = mixer(torch.randn(1, seq_len, 20, dtype=dtype))
            real = sum(tensor.nbytes for tensor in tensors(state).values())
            assert mixer.state_bytes(seq_len, dtype) == real


@pytest.mark.parametrize("name", MIXERS)
def test_no_token_sees_a_later_one(make_mixer: Callable[..., nn.Module], name: str) -> None:
    mixer = make_mixer(**MIXERS[name])
    hidden = torch.randn(1, 41, 20, dtype=torch.float64)
    changed = hidden.clone()
    changed[:, 23:] = 3 * torch.randn(1, 18, 20, dtype=torch.float64)
    with torch.no_grad():
        before, after = mixer(hidden)[0], mixer(changed)[0]
    assert torch.equal(before[:, :23], after[:, :23])  # bits, since shapes and places are the same
    assert not torch.equal(before[:, 23], after[:, 23])


@pytest.mark.parametrize("name", MIXERS)
def test_gradients_flow_through_the_state_as_through_the_whole_sequence(
    make_mixer: Callable[..., nn.Module], name: str
) -> None:
    """Two tokens first: fewer than the convolution remembers."""
    mixer = make_mixer(**MIXERS[name])
    hidden = torch.randn(2, 19, 20, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 19, 20, dtype=torch.float64)
    leaves = [hidden, *mixer.parameters()]
    expected = torch.autograd.grad((mixer(hidden)[0] * weight).sum(), leaves)
    got = torch.autograd.grad((run(mixer, hidden, [2, 1, 16])[0] * weight).sum(), leaves)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", MIXERS)
def test_packed_documents_equal_separate_runs(make_mixer: Callable[..., nn.Module], name: str) -> None:
    """Outputs, states and every gradient; two documents are empty and rows follow the last one."""
    mixer = make_mixer(**MIXERS[name])
    lengths, tail = [37, 0, 1, 51, 2, 0], 3
    offsets = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    hidden = torch.randn(1, sum(lengths) + tail, 20, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(hidden)
    leaves = [hidden, *mixer.parameters()]
    with torch.no_grad():
        _, start = mixer(torch.randn(len(lengths), 5, 20, dtype=torch.float64))

    for initial in (None, start):
        output, state = mixer(hidden, initial, cu_seqlens=cu_seqlens)
        got = torch.autograd.grad((output * weight).sum(), leaves)
        assert torch.equal(output[:, offsets[-1] :], torch.zeros(1, tail, 20, dtype=torch.float64))
        assert torch.equal(got[0][:, offsets[-1] :], torch.zeros(1, tail, 20, dtype=torch.float64))

        loss = hidden.new_zeros(())
        for n, (a, b) in enumerate(zip(offsets, offsets[1:], strict=False)):
            own = None if initial is None else initial.select([n])
            if a == b:
                continue
            alone, own = mixer(hidden[:, a:b], own)
            loss = loss + (alone * weight[:, a:b]).sum()
            torch.testing.assert_close(output[:, a:b], alone, rtol=0, atol=TOLERANCE)
            follow = torch.randn(1, 3, 20, dtype=torch.float64)
            with torch.no_grad():
                torch.testing.assert_close(
                    mixer(follow, state.select([n]))[0], mixer(follow, own)[0], rtol=0, atol=TOLERANCE
                )
        for one, other in zip(got, torch.autograd.grad(loss, leaves), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["gated_deltanet", "full_attention", "window_attention"])
def test_empty_documents_keep_their_state(make_mixer: Callable[..., nn.Module], name: str) -> None:
    mixer = make_mixer(**MIXERS[name])
    _, start = mixer(torch.randn(3, 9, 20, dtype=torch.float64))
    cu_seqlens = torch.tensor([0, 0, 4, 4], dtype=torch.int32)
    _, state = mixer(torch.randn(1, 4, 20, dtype=torch.float64), start, cu_seqlens=cu_seqlens)
    follow = torch.randn(2, 3, 20, dtype=torch.float64)
    expected, got = mixer(follow, start.select([0, 2]))[0], mixer(follow, state.select([0, 2]))[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
