"""The state mixer against its plain formula, and what its options do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from statemix.mixers import RMSNorm, StateMixer, build_mixer
from statemix.mixers.key_norm import unit_length
from statemix.transitions.engine import choice

CASES: dict[str, dict[str, Any]] = {
    "gated_delta": {"transition": "gated_deltanet", "conv_size": 4, "conv_bias": True, "output_gate": "silu"},
    # 4 heads of 150 values: 600 channels, past 512 where fused norms elsewhere take another path
    "wide_values": {"transition": "mamba2", "value_dim": 150, "output_gate": "sigmoid", "value_map": "silu"},
    "two_writes": {"transition": "gated_deltaproduct", "conv_size": 3, "output_norm": "none", "output_gate": "silu"},
    "free_keys": {"transition": "gla", "key_norm": "none", "feature_map": "identity"},
    "two_blocks": {"transition": {"type": "block_diagonal", "inner": "householder", "blocks": 2}, "conv_size": 2},
}


def plain(mixer: StateMixer, options: dict[str, Any], hidden: Tensor) -> Tensor:
    """Every arrow of the diagram written out, M_t dense, one token after another."""
    maps = {"silu": lambda x: x * torch.sigmoid(x), "sigmoid": torch.sigmoid, "identity": lambda x: x}
    writes, batch, seq_len = mixer.transition.num_writes, *hidden.shape[:2]
    streams = torch.cat([hidden @ layer.weight.T for layer in (mixer.query, mixer.key, mixer.value)], dim=-1)
    if (width := options.get("conv_size", 0)) > 0:
        padded = F.pad(streams, (0, 0, width - 1, 0))
        streams = sum(padded[:, j : j + seq_len] * mixer.convolution.weight[j] for j in range(width))
        streams = streams if mixer.convolution.bias is None else streams + mixer.convolution.bias
    query, key, value = streams.split(mixer.channels, dim=-1)
    query, key = (maps[options.get("feature_map", "silu")](x) for x in (query, key))
    value = maps[options.get("value_map", "identity")](value)
    query, key = query.view(batch, seq_len, 1, 2, 6), key.view(batch, seq_len, writes, 2, 6)
    value = value.view(batch, seq_len, writes, 4, -1)
    if options.get("key_norm", "l2") == "l2":
        query, key = (_unit(x, mixer.transition.blocks) for x in (query, key))

    transition, write = mixer.transition(hidden, key if writes > 1 else key[:, :, 0])
    write = torch.ones(batch, seq_len, writes, 4) if write is None else write.view(batch, seq_len, writes, 4, -1)
    write = write.expand(batch, seq_len, writes, 4, mixer.transition.blocks) if write.ndim == 5 else write[..., None]
    write = write.repeat_interleave(6 // write.shape[-1], dim=-1)
    query, key = query.repeat_interleave(2, dim=3), write * key.repeat_interleave(2, dim=3)
    state, outputs = hidden.new_zeros(batch, 4, value.shape[-1], 6), []
    dense = [step.materialize(6).expand(batch, seq_len, 4, 6, 6) for step in transition.steps()]
    assert len(dense) == writes
    for t in range(seq_len):
        for j in range(writes):
            state = state @ dense[j][:, t] + value[:, t, j, :, :, None] * key[:, t, j, :, None, :]
        outputs.append((state * query[:, t, 0, :, None, :]).sum(-1) / 6**0.5)
    mixed = torch.stack(outputs, dim=1)
    if isinstance(mixer.norm, RMSNorm):
        mixed = mixer.norm.weight * mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    mixed = mixed.flatten(-2)
    if (gate := options.get("output_gate", "none")) != "none":
        mixed = mixed * maps[gate](hidden @ mixer.gate.weight.T)
    return mixed @ mixer.output.weight.T


def _unit(x: Tensor, blocks: int) -> Tensor:
    cut = x.unflatten(-1, (blocks, -1))
    return (cut / (cut.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2)


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_plain_formula_with_every_parameter_gradient(
    make_mixer: Callable[..., nn.Module], name: str
) -> None:
    mixer = make_mixer(type="state", **CASES[name])
    hidden = torch.randn(2, 21, 20, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 21, 20, dtype=torch.float64)
    output, expected = mixer(hidden)[0], plain(mixer, CASES[name], hidden)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-11)
    names, leaves = zip(*mixer.named_parameters(), strict=True)
    got = torch.autograd.grad((output * weight).sum(), (hidden, *leaves))
    right = torch.autograd.grad((expected * weight).sum(), (hidden, *leaves))
    for leaf, one, other in zip(("hidden", *names), got, right, strict=True):
        assert other.norm() > 0, leaf
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, msg=lambda text, leaf=leaf: f"{leaf}: {text}")


def test_upstream_gradients_may_have_any_strides(make_mixer: Callable[..., nn.Module]) -> None:
    """From a sum (all strides 0), a transpose and a concatenation; hidden states as a transposed view."""
    mixer = make_mixer(type="state", **CASES["gated_delta"])
    hidden = torch.randn(20, 21, 2, dtype=torch.float64).transpose(0, 2).requires_grad_()
    weight = torch.randn(2, 20, 21, dtype=torch.float64)
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda y: y.sum(),
        lambda y: (y.transpose(1, 2) * weight).sum(),
        lambda y: torch.cat([y, 2 * y], dim=-1).square().sum(),
    ]
    for loss in losses:
        got = torch.autograd.grad(loss(mixer(hidden)[0]), hidden)[0]
        own = hidden.detach().contiguous().requires_grad_()
        expected = torch.autograd.grad(loss(mixer(own)[0].contiguous().clone()), own)[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_every_dtype_runs_and_keeps_a_wide_state(
    make_mixer: Callable[..., nn.Module], name: str, dtype: torch.dtype
) -> None:
    mixer = make_mixer(type="state", **CASES[name]).to(dtype)
    output, state = mixer(torch.randn(1, 21, 20, dtype=dtype))
    assert output.dtype == dtype and output.isfinite().all()
    assert state.recurrent.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("name", CASES)
def test_autocast_trains_float32_parameters(make_mixer: Callable[..., nn.Module], name: str) -> None:
    """The backward pass runs outside the autocast block."""
    mixer = make_mixer(type="state", **CASES[name]).float()
    hidden = torch.randn(1, 21, 20)
    expected = mixer(hidden)[0]
    with torch.autocast("cpu", torch.bfloat16):
        output, state = mixer(hidden)
        assert state.recurrent.dtype == torch.float32
    output.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in mixer.parameters())
    # bfloat16 keeps 8 bits, 0.4% a rounding; the read-out adds up a few tens of roundings.
    assert (output - expected).norm() <= 0.05 * expected.norm()


def test_keys_have_unit_length_in_each_block_and_zero_keys_stay_zero() -> None:
    key = torch.randn(3, 2, 6, dtype=torch.float64)
    torch.testing.assert_close(unit_length(key, eps=0.0).norm(dim=-1), torch.ones(3, 2, dtype=torch.float64))
    assert unit_length(1e3 * torch.ones(4, dtype=torch.float16)).isfinite().all()
    zero = torch.zeros(1, 5, requires_grad=True)
    unit = unit_length(zero)
    unit.sum().backward()
    assert torch.equal(unit, torch.zeros(1, 5)) and zero.grad.isfinite().all()


def test_a_delta_rule_without_unit_keys_is_refused() -> None:
    config = StateMixer.Config(num_heads=2, key_dim=4, value_dim=4, transition="gated_deltanet", key_norm="none")
    with pytest.raises(ValueError, match="key_norm: expected l2 .* got none; set key_norm: l2"):
        build_mixer(config, hidden_size=8)


def test_value_heads_that_do_not_divide_are_refused() -> None:
    for num_value_heads in (6, 2):
        with pytest.raises(ValidationError, match=f"multiple of num_heads 4, got {num_value_heads}"):
            StateMixer.Config(
                num_heads=4, num_value_heads=num_value_heads, key_dim=4, value_dim=4, transition="deltanet"
            )


def test_the_norm_is_computed_in_float32_and_returned_in_the_dtype_it_came_in() -> None:
    norm = RMSNorm(5, eps=1e-3)
    nn.init.normal_(norm.weight)
    x = 100 * torch.randn(3, 5)
    expected = norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected)
    low = norm(x.half())  # the mean square is past the largest float16, 65504
    assert low.dtype == torch.float16
    torch.testing.assert_close(low.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("transition", ["gla", "gated_deltanet"])
def test_recomputing_changes_no_bit_of_the_gradients(make_mixer: Callable[..., nn.Module], transition: str) -> None:
    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        mixer = make_mixer(type="state", transition=transition, recompute=recompute)
        mixed, _ = mixer(torch.randn(2, 33, 20, dtype=torch.float64))
        grads.append(torch.autograd.grad(mixed.square().sum(), list(mixer.parameters())))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_it_says_what_runs_it_in_training_and_asks_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_obstacle", lambda device: None)
    sizes: dict[str, Any] = {"type": "state", "num_heads": 2, "key_dim": 6, "value_dim": 5, "rotary": False}
    names = ("linear_attention", "retnet", "mamba2", "gla", "deltanet", "gated_deltaproduct")
    said = {}
    for name in names:
        with torch.device("meta"):
            mixer = build_mixer(StateMixer.Config(**sizes, transition=name), hidden_size=20)
        said[name] = [mixer.kernel(seq_len, torch.device(device)) for device in ("cpu", "cuda") for seq_len in (5, 40)]
    assert said == dict.fromkeys(names, ["torch recurrent", "torch chunk", "triton chunk", "triton chunk"])
