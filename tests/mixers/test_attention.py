"""Softmax attention against the dense definition."""

import math
from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from statemix.mixers import Attention
from statemix.mixers.rotary import rotate
from statemix.mixers.softmax import attend


def dense(query: Tensor, key: Tensor, value: Tensor, *, filled: Tensor, window: int | None) -> Tensor:
    """softmax_s(q_t k_s / sqrt(D)) v_s with every rule written out, one query at a time."""
    batch, seq_len, num_heads, head_dim = query.shape
    past, group = key.shape[1] - seq_len, num_heads // key.shape[2]
    output = torch.zeros_like(query)
    for b in range(batch):
        for h in range(num_heads):
            for t in range(seq_len):
                last = past + t
                first = past - min(int(filled[b]), past)
                first = first if window is None else max(first, last - window + 1)
                seen = slice(first, last + 1)
                score = key[b, seen, h // group] @ query[b, t, h] / math.sqrt(head_dim)
                output[b, t, h] = score.softmax(0) @ value[b, seen, h // group]
    return output


@pytest.mark.parametrize("window", [None, 1, 3, 65])
@pytest.mark.parametrize(("seq_len", "past"), [(1, 0), (37, 0), (1, 9), (5, 2), (263, 0), (263, 2)])
def test_attention_equals_the_definition(window: int | None, seq_len: int, past: int) -> None:
    """263 tokens are more than 4 blocks of 65, so that both the dense and the blocked way run."""
    past = past if window is None else min(past, window - 1)
    query = torch.randn(2, seq_len, 4, 6, dtype=torch.float64)
    key, value = torch.randn(2, 2, seq_len + past, 2, 6, dtype=torch.float64)
    filled = torch.tensor([min(1, past), 100])
    got = attend(query, key, value, filled=filled, window=window)
    expected = dense(query, key, value, filled=filled, window=window)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


def test_places_left_of_the_cached_tokens_are_never_read() -> None:
    """They may hold anything finite: here the largest numbers there are."""
    query, key, value = torch.randn(3, 1, 70 * 5, 2, 6, dtype=torch.float64)
    for window, seq_len in ((None, 3), (5, 3), (5, 350)):
        new = slice(-seq_len, None)
        history = torch.full((1, 4, 2, 6), 1e300, dtype=torch.float64)
        padded = [torch.cat([history, x[:, new]], dim=1) for x in (key, value)]
        filled = torch.tensor([0])
        got = attend(query[:, new], *padded, filled=filled, window=window)
        expected = attend(query[:, new], key[:, new], value[:, new], filled=filled, window=window)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


def test_a_window_hides_what_lies_before_it(make_mixer: Callable[..., nn.Module]) -> None:
    """Token t sees keys t - 6 .. t of window 7, in one call and step by step."""
    mixer = make_mixer(type="attention", num_heads=2, window=7)
    hidden = torch.randn(1, 20, 20, dtype=torch.float64)
    for distance, is_seen in ((6, True), (7, False)):
        changed = hidden.clone()
        changed[:, 15 - distance] += 1
        outputs = []
        for x in (hidden, changed):
            state = None
            for t in range(16):
                step, state = mixer(x[:, t : t + 1], state)
            outputs.append((mixer(x)[0][:, 15], step[:, 0]))
        for before, after in zip(*outputs, strict=True):
            assert torch.equal(before, after) is not is_seen  # bits, since shapes and places are the same


def test_rotary_products_depend_on_the_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64)

    def product(t: int, s: int) -> Tensor:
        turned = [rotate(x, torch.tensor([[p]]), base=10000.0) for x, p in ((query, t), (key, s))]
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(product(5, 2), product(1005, 1002), rtol=0, atol=1e-12)
    assert not torch.allclose(product(5, 2), product(5, 3))
    torch.testing.assert_close(product(4, 4), (query * key).sum(-1), rtol=0, atol=1e-13)


def test_positions_go_on_from_each_rows_own_length(make_mixer: Callable[..., nn.Module]) -> None:
    """Without rotary the state has no positions, so a shift would go unseen: rotary is on."""
    mixer = make_mixer(type="attention", num_heads=2)
    hidden = torch.randn(1, 12, 20, dtype=torch.float64)
    _, state = mixer(hidden[:, :9], cu_seqlens=torch.tensor([0, 2, 9], dtype=torch.int32))
    assert state.length.tolist() == [2, 7]
    new = hidden[:, 9:].expand(2, -1, -1)
    got = mixer(new, state)[0]
    for row, prompt in enumerate((hidden[:, :2], hidden[:, 2:9])):
        expected = mixer(torch.cat([prompt, hidden[:, 9:]], dim=1))[0][0, -3:]
        torch.testing.assert_close(got[row], expected, rtol=0, atol=1e-12)


def test_the_cache_is_as_long_as_the_longest_row(make_mixer: Callable[..., nn.Module]) -> None:
    """Five tokens for one row, then five for the other: five places, not ten."""
    mixer = make_mixer(type="attention", num_heads=2)
    state = None
    for offsets in ([0, 5, 5], [0, 0, 5]):
        hidden = torch.randn(1, 5, 20, dtype=torch.float64)
        _, state = mixer(hidden, state, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
    assert state.length.tolist() == [5, 5]
    assert state.key.shape[1] == 5


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_a_key_heads_gradient_is_the_sum_over_its_query_heads(
    make_mixer: Callable[..., nn.Module], num_kv_heads: int
) -> None:
    grouped = make_mixer(type="attention", num_heads=4, head_dim=6, num_kv_heads=num_kv_heads)
    full = make_mixer(type="attention", num_heads=4, head_dim=6)
    with torch.no_grad():
        full.query.weight.copy_(grouped.query.weight)
        full.output.weight.copy_(grouped.output.weight)
        full.key.weight.copy_(_repeat(grouped.key.weight, num_kv_heads))
        full.value.weight.copy_(_repeat(grouped.value.weight, num_kv_heads))
    hidden = torch.randn(2, 11, 20, dtype=torch.float64)
    weight = torch.randn_like(hidden)
    (grouped(hidden)[0] * weight).sum().backward()
    (full(hidden)[0] * weight).sum().backward()
    for name in ("key", "value"):
        got, each = getattr(grouped, name).weight.grad, getattr(full, name).weight.grad
        expected = each.view(num_kv_heads, 4 // num_kv_heads, 6, 20).sum(1).flatten(0, 1)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def _repeat(weight: Tensor, num_kv_heads: int) -> Tensor:
    return weight.view(num_kv_heads, 6, 20).repeat_interleave(4 // num_kv_heads, dim=0).flatten(0, 1)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValidationError, match="divisor of num_heads 4, got 3"):
        Attention.Config(num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="divisor of hidden_size 20, got 3"):
        Attention(Attention.Config(num_heads=3), hidden_size=20)
    with pytest.raises(ValueError, match="even number for rotary positions, got 5"):
        Attention(Attention.Config(num_heads=4), hidden_size=20)


def test_a_window_costs_its_own_length_and_not_the_sequence() -> None:
    """All pairs of 50000 tokens would be 2.5e9 scores, 10 GB; the last tokens alone give the same."""
    query, key, value = torch.randn(3, 1, 50_000, 1, 4)
    none = torch.zeros(1, dtype=torch.int64)
    output = attend(query, key, value, filled=none, window=8)[:, -30:]
    last = attend(query[:, -37:], key[:, -37:], value[:, -37:], filled=none, window=8)[:, -30:]
    torch.testing.assert_close(output, last, rtol=0, atol=1e-6)
