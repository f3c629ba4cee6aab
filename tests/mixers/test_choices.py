"""The choices of a mixer, each against its formula in plain float64, and each through every check of a whole mixer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from statemix.harness import check_mixer
from statemix.mixers import FEATURE_MAPS, MixerSpec, StateError, StateMixer, build_mixer
from statemix.mixers.feature_map import ElementwiseProduct, build_feature_map, non_negative_maps
from statemix.mixers.key_norm import KEY_NORMS

MakeMixer = Callable[..., nn.Module]

DECAYS = {"identity": "identity", "retnet": "retnet", "mamba2": "mamba2", "gla": "gla"}
BLOCKS = {"type": "block_diagonal", "inner": "scalar_gate", "blocks": 2}
CHOICES: dict[str, dict[str, Any]] = {
    "relu": {"transition": "gla", "feature_map": "relu"},
    "elu_plus_one_l1": {"transition": "deltanet", "feature_map": "elu_plus_one", "key_norm": "l1", "conv_size": 4},
    "softmax": {"transition": "gated_deltanet", "feature_map": "softmax"},
    "softmax_in_blocks": {"transition": BLOCKS, "feature_map": "softmax", "key_norm": "none"},
    "elementwise_product": {"transition": "identity", "feature_map": "elementwise_product", "key_norm": "none"},
    "rotary": {"transition": "retnet", "feature_map": "identity", "key_norm": "none", "rotary": True},
    "rotary_in_blocks": {"transition": BLOCKS | {"inner": "householder"}, "rotary": True, "conv_size": 2},
    "rotary_two_writes": {"transition": "deltaproduct", "rotary": True},
    # Without an output norm: it takes no notice of lengths, so beside the small steps of a Mamba-2 gate the gradient
    # of D would be what is left when nearly all cancels, far less exact than the checks allow.
    "skip": {"transition": "mamba2", "has_skip": True, "conv_size": 4, "output_norm": "none", "output_gate": "silu"},
    "normalizer": {"transition": "identity", "feature_map": "elu_plus_one", "key_norm": "none", "is_normalized": True},
    "normalizer_in_blocks": {"transition": BLOCKS, "feature_map": "softmax", "is_normalized": True, "has_skip": True},
}
SIZES = {"type": "state", "num_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 5, "chunk_size": 16}


LONG = ("relu", "softmax", "softmax_in_blocks", "rotary", "rotary_two_writes")  # close to one of the others


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in (*CHOICES, "qk_norm")]
)
def test_a_mixer_with_the_choice_passes_every_check_of_a_mixer(name: str) -> None:
    options = {"type": "attention", "num_heads": 2, "qk_norm": True, "window": 5}
    report = check_mixer(SIZES | CHOICES[name] if name in CHOICES else options, hidden_size=12, seq_len=19)
    assert report.ok, report


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x * (x > 0),
    "elu_plus_one": lambda x: torch.where(x > 0, x + 1, torch.exp(x)),
    "identity": lambda x: x,
    "softmax": lambda x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True),
    "l2": lambda x: x / ((x**2).sum(-1, keepdim=True) + 1e-6).sqrt(),
    "l1": lambda x: x / torch.maximum(x.abs().sum(-1, keepdim=True), torch.tensor(1e-3)),
    "none": lambda x: x,
}


@pytest.mark.parametrize("name", ["silu", "relu", "elu_plus_one", "identity", "softmax"])
def test_a_feature_map_is_its_formula(name: Any) -> None:
    x = 3 * torch.randn(2, 7, 3, 5, dtype=torch.float64)
    mapped = build_feature_map(FEATURE_MAPS.validated(name), size=5)(x)
    torch.testing.assert_close(mapped, FORMULAS[name](x), rtol=0, atol=1e-14)
    assert not (name in non_negative_maps() and (mapped < 0).any())
    with torch.autocast("cpu", torch.bfloat16):
        low = build_feature_map(FEATURE_MAPS.validated(name), size=5)(x.bfloat16())
    assert low.dtype == torch.bfloat16
    # Half a unit in the last of 8 bits is 2^-9; silu rounds its sigmoid as well.
    torch.testing.assert_close(low.double(), FORMULAS[name](x.bfloat16().double()), rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", ["l2", "l1", "none"])
def test_a_key_norm_is_its_formula_and_a_zero_key_stays_zero(name: Any) -> None:
    x = torch.randn(2, 7, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(KEY_NORMS[name](x), FORMULAS[name](x), rtol=0, atol=1e-14)
    zero = torch.zeros(1, 5, dtype=torch.float16, requires_grad=True)
    normed = KEY_NORMS[name](zero)
    normed.sum().backward()
    assert torch.equal(normed, zero) and zero.grad is not None and zero.grad.isfinite().all()
    assert KEY_NORMS[name](torch.full((4,), 6e4, dtype=torch.float16)).isfinite().all()


def test_the_elementwise_product_is_that_of_two_projections_shared_by_all_heads() -> None:
    product = ElementwiseProduct(5).double()
    x = torch.randn(2, 7, 3, 5, dtype=torch.float64)
    one, other = ((x[:, :, 1] @ layer.weight.T) + layer.bias for layer in (product.left, product.right))
    torch.testing.assert_close(product(x)[:, :, 1], one * other, rtol=0, atol=1e-14)


def test_a_softmax_map_sums_to_one_in_each_head_and_not_over_all_heads(make_mixer: MakeMixer) -> None:
    seen: list[Tensor] = []
    mixer = make_mixer(type="state", num_heads=4, transition="gla", feature_map="softmax", key_norm="none")
    mixer.query_map.register_forward_hook(lambda module, inputs, mapped: seen.append(mapped))
    mixer(torch.randn(2, 7, 20, dtype=torch.float64))
    torch.testing.assert_close(seen[0].flatten(3).sum(-1), torch.ones(2, 7, 4, dtype=torch.float64))


def heads(mixer: Any, hidden: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [B, T, HV, K] as one channel after another is computed, and values [B, T, HV, V]."""
    query, key, value = (layer(hidden) for layer in (mixer.query, mixer.key, mixer.value))
    query, key = (x.view(*hidden.shape[:2], 2, 6) for x in (query, key))
    for step in (options.get("feature_map", "silu"), options.get("key_norm", "l2")):
        query, key = FORMULAS[step](query), FORMULAS[step](key)
    if options.get("rotary"):
        query, key = turned(query), turned(key)
    return *(x.repeat_interleave(2, dim=2) for x in (query, key)), value.view(*hidden.shape[:2], 4, 5)


def turned(x: Tensor) -> Tensor:
    """Channels c and c + K/2 as a complex number times e^(i t 10000^(-2c/K))."""
    half = x.shape[-1] // 2
    place = torch.arange(x.shape[1], dtype=torch.float64)[:, None]
    angle = place * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    product = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([product.real, product.imag], dim=-1)


def weights(mixer: Any, hidden: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """a_ts [B, HV, T, T] for scalar decays: scale * w_s q_t k_s times the decays after s."""
    transition, write = mixer.transition(hidden, key)
    log_decay = getattr(transition, "log_decay", torch.zeros(4, dtype=torch.float64)).expand(*hidden.shape[:2], 4)
    total = log_decay.cumsum(1).transpose(1, 2)
    decay = (total[..., :, None] - total[..., None, :]).exp()
    product = torch.einsum("bthk,bshk->bhts", query, key) / 6**0.5 * decay
    return (product if write is None else product * write.transpose(1, 2)[:, :, None]).tril()


PLAIN: dict[str, dict[str, Any]] = {
    "rotary": {"transition": "retnet", "feature_map": "identity", "key_norm": "none", "rotary": True},
    "rotary_l1": {"transition": "mamba2", "key_norm": "l1", "rotary": True, "has_skip": True},
    "skip": {"transition": "mamba2", "has_skip": True},
    "normalizer": {"transition": "identity", "feature_map": "elu_plus_one", "key_norm": "none", "is_normalized": True},
    "normalizer_gated": {"transition": "mamba2", "feature_map": "relu", "is_normalized": True, "has_skip": True},
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_mixer_is_its_attention_matrix_with_all_gradients(make_mixer: MakeMixer, name: str) -> None:
    options = PLAIN[name]
    mixer: Any = make_mixer(type="state", output_norm="none", **options)
    if mixer.skip is not None:
        nn.init.normal_(mixer.skip)
    hidden = torch.randn(2, 21, 20, dtype=torch.float64, requires_grad=True)
    query, key, value = heads(mixer, hidden, options)
    matrix = weights(mixer, hidden, query, key)
    if options.get("is_normalized"):
        total = matrix.sum(-1, keepdim=True)
        matrix = matrix / torch.where(total == 0, 1, total)
    mixed = torch.einsum("bhts,bshv->bthv", matrix, value)
    if mixer.skip is not None:
        mixed = mixed + mixer.skip[:, None] * value
    expected, output = mixer.output(mixed.flatten(2)), mixer(hidden)[0]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-11)
    leaves = (hidden, *mixer.parameters())
    weight = torch.randn_like(output)
    got = torch.autograd.grad((output * weight).sum(), leaves)
    right = torch.autograd.grad((expected * weight).sum(), leaves)
    for one, other in zip(got, right, strict=True):
        assert other.norm() > 0
        assert (one - other).norm() <= 1e-10 * other.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transition", [*DECAYS.values(), BLOCKS], ids=str)
def test_values_that_are_all_one_come_out_as_one_at_every_token(transition: Any, dtype: torch.dtype) -> None:
    options = SIZES | {"transition": transition, "feature_map": "elu_plus_one", "is_normalized": True}
    mixer: Any = build_mixer(TypeAdapter(MixerSpec).validate_python(options), hidden_size=12).to(dtype)
    seen: list[Tensor] = []
    mixer.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    mixer.value.register_forward_hook(lambda module, inputs, value: torch.ones_like(value))
    with torch.no_grad():
        mixer(torch.randn(2, 37, 12, dtype=dtype))
    # A product may sum the channels of a value in another order than its column of ones: a rounding or two.
    assert ((seen[0] - 1).abs() <= 2 * torch.finfo(dtype).eps).all()


def test_a_sum_of_weights_of_zero_gives_zero_and_finite_gradients(make_mixer: MakeMixer) -> None:
    options = {"feature_map": "relu", "key_norm": "none", "is_normalized": True, "output_norm": "none"}
    mixer: Any = make_mixer(type="state", transition="gla", **options)
    with torch.no_grad():
        mixer.key.weight.copy_(-mixer.key.weight.abs())
    hidden = torch.rand(1, 9, 20, dtype=torch.float64, requires_grad=True)
    output, _ = mixer(hidden)
    output.sum().backward()
    assert torch.equal(output, torch.zeros_like(output)) and hidden.grad is not None and hidden.grad.isfinite().all()


@pytest.mark.parametrize("transition", ["retnet", "deltaproduct", BLOCKS], ids=str)
def test_positions_go_on_from_the_state_and_start_anew_in_each_packed_document(
    make_mixer: MakeMixer, transition: Any
) -> None:
    mixer = make_mixer(type="state", key_dim=8, transition=transition, rotary=True)
    rows, more = torch.randn(3, 11, 20, dtype=torch.float64), torch.randn(3, 4, 20, dtype=torch.float64)
    lengths = [7, 0, 11]
    parts = [row[:size] for row, size in zip(rows, lengths, strict=True)]
    rest = torch.randn(2, 20, dtype=torch.float64)
    offsets = torch.tensor([0, 7, 7, 18], dtype=torch.int32)
    packed, state = mixer(torch.cat([*parts, rest])[None], cu_seqlens=offsets)
    assert state.position.tolist() == [[7], [0], [11]]
    after, last = mixer(more, state)
    assert last.position.tolist() == [[11], [4], [15]]
    for row, (size, start) in enumerate(zip(lengths, offsets.tolist(), strict=False)):
        whole, _ = mixer(torch.cat([rows[row, :size], more[row]])[None])
        got = torch.cat([packed[0, start : start + size], after[row]])
        torch.testing.assert_close(got, whole[0], rtol=0, atol=1e-12)
    assert torch.equal(packed[0, 18:], torch.zeros(2, 20, dtype=torch.float64))


def test_a_rotary_product_depends_on_distances_only(make_mixer: MakeMixer) -> None:
    """Started at another position, with nothing in memory, the mixer says the same."""
    mixer: Any = make_mixer(type="state", transition="retnet", rotary=True)
    hidden = torch.randn(1, 9, 20, dtype=torch.float64)
    _, state = mixer(torch.zeros(1, 5, 20, dtype=torch.float64))
    assert not state.recurrent.any() and state.position.item() == 5
    torch.testing.assert_close(mixer(hidden, state)[0], mixer(hidden)[0], rtol=0, atol=1e-12)


def test_a_state_without_positions_is_refused_by_a_rotary_mixer(make_mixer: MakeMixer) -> None:
    hidden = torch.randn(2, 3, 20, dtype=torch.float64)
    plain, rotary = (make_mixer(type="state", transition="retnet", rotary=rotary) for rotary in (False, True))
    with pytest.raises(StateError, match=r"state.position: expected shape \[2, 1\], got \[2, 0\]"):
        rotary(hidden, plain(hidden)[1])
    with pytest.raises(StateError, match=r"state.position: expected shape \[2, 0\], got \[2, 1\]"):
        plain(hidden, rotary(hidden)[1])


def test_the_skip_starts_at_one_takes_no_decay_and_leaves_the_rest_of_a_row_zero(make_mixer: MakeMixer) -> None:
    mixer: Any = make_mixer(type="state", transition="mamba2", has_skip=True, output_norm="none", conv_size=3)
    assert torch.equal(mixer.skip, torch.ones_like(mixer.skip)) and mixer.skip.no_weight_decay
    without = copy.deepcopy(mixer)
    without.skip = None
    hidden = torch.randn(1, 6, 20, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    output = mixer(hidden, cu_seqlens=offsets)[0]
    assert torch.equal(output[:, 4:], torch.zeros_like(output[:, 4:]))
    assert not torch.autograd.grad(output.sum(), hidden)[0][:, 4:].any()
    assert (output - without(hidden, cu_seqlens=offsets)[0])[:, :4].abs().amin(dim=-1).all()


def test_attention_with_qk_norm_is_its_plain_formula(make_mixer: MakeMixer) -> None:
    mixer: Any = make_mixer(type="attention", num_heads=2, qk_norm=True)
    hidden = torch.randn(2, 9, 20, dtype=torch.float64)

    def normed(layer: nn.Linear, norm: Any) -> Tensor:
        x = layer(hidden).view(2, 9, 2, 10)
        return turned(x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight)

    query, key = normed(mixer.query, mixer.query_norm), normed(mixer.key, mixer.key_norm)
    scores = torch.einsum("bthd,bshd->bhts", query, key) / 10**0.5
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), mixer.value(hidden).view(2, 9, 2, 10))
    torch.testing.assert_close(mixer(hidden)[0], mixer.output(mixed.flatten(2)), rtol=0, atol=1e-12)
    assert mixer.query_norm.weight is not mixer.key_norm.weight


def test_l1_keys_keep_a_delta_rule_bounded(make_mixer: MakeMixer) -> None:
    """Never longer than l2 keys, so 1 - beta |k|^2 stays in [-1, 1]: an old state does not grow, beta = 2 included."""
    options = {"transition": {"type": "householder", "max_beta": 2.0}, "feature_map": "identity", "key_norm": "l1"}
    mixer: Any = make_mixer(type="state", **options)
    with torch.no_grad():
        mixer.value.weight.zero_()
        _, start = mixer(torch.randn(1, 1, 20, dtype=torch.float64))
        old = copy.deepcopy(start.recurrent).normal_()
        state = type(start)(old, start.conv, start.position)
        _, after = mixer(100 * torch.randn(1, 200, 20, dtype=torch.float64), state)
    assert torch.linalg.matrix_norm(after.recurrent, 2).le(torch.linalg.matrix_norm(old, 2) + 1e-12).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transition": "retnet", "feature_map": "silu"}, "beside feature_map silu; take one of relu, elu_plus_one"),
        ({"transition": "retnet", "feature_map": "elementwise_product"}, "beside feature_map elementwise_product"),
        ({"transition": "deltanet", "feature_map": "relu"}, "beside a transition that does more than let decay"),
        ({"transition": BLOCKS | {"inner": "kda"}, "feature_map": "relu"}, "does more than let decay"),
        ({"transition": "retnet", "feature_map": "relu", "rotary": True}, "beside rotary positions"),
    ],
)
def test_a_normalizer_beside_weights_that_may_be_negative_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"is_normalized: expected false, .* {message}"):
        StateMixer.Config.model_validate(SIZES | {"is_normalized": True} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transition": "deltanet", "key_norm": "none"}, "key_norm: expected l2 or l1, .* got none; set key_norm: l2"),
        ({"transition": "deltaproduct", "has_skip": True}, "has_skip: expected false, got true with 2 values a token"),
        ({"transition": "retnet", "key_dim": 7, "rotary": True}, "key_dim: expected an even number .* got 7 in 1"),
        ({"transition": BLOCKS, "key_dim": 6, "rotary": True}, "key_dim: expected an even number .* got 6 in 2"),
    ],
)
def test_choices_that_do_not_fit_the_transition_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_mixer(StateMixer.Config.model_validate(SIZES | options), hidden_size=12)


@pytest.mark.parametrize(
    ("field", "known"),
    [("feature_map", "expected one of silu, relu, elu_plus_one"), ("key_norm", "Input should be 'l2', 'l1'")],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(field: str, known: str) -> None:
    with pytest.raises(ValidationError, match=known):
        StateMixer.Config.model_validate(SIZES | {"transition": "gla", field: "elu"})
