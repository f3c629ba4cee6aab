"""Small inputs whose right answer is known in closed form, most of them faults that other libraries have had."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from statemix import explain, scan
from statemix.kernels import NormalForm
from statemix.transitions import (
    BlockDiagonal,
    Constant,
    DiagonalGate,
    FixedDecay,
    Householder,
    Identity,
    Key,
    Product,
    Rate,
    ScalarGate,
    Transition,
    UnitKey,
)

FORMS = ("recurrent", "chunk", "parallel")
EPS = torch.finfo(torch.float64).eps


def unit(*shape: int) -> Tensor:
    return F.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def relative(x: Tensor, y: Tensor) -> float:
    return float(((x.double() - y).norm() / y.norm()).detach())


@pytest.mark.parametrize("form", FORMS)
def test_log_decay_is_a_natural_logarithm(form: str) -> None:
    """One token, nothing written: the state is e^-1, not 1/2."""
    one, zero = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    for gate in (ScalarGate(-one[..., 0]), DiagonalGate(-one), FixedDecay(-one[0, 0, 0])):
        state = scan(one, one, zero, gate, initial_state=one, form=form).final_state
        assert state.item() == pytest.approx(math.exp(-1), rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_equal_keys_with_beta_one_read_back_the_last_value(form: str) -> None:
    """One repeated unit key: powers of the Gram matrix would reach 1e17 here, forward substitution is exact."""
    key = unit(1, 1, 1, 16).expand(1, 64, 1, 16).unsqueeze(3)[:, :, :, 0]
    v, beta = torch.randn(1, 64, 1, 8, dtype=torch.float64), torch.ones(1, 64, 1, dtype=torch.float64)
    output = scan(key, key, v, Householder(key, beta), write=beta, scale=1.0, form=form).output
    assert relative(output, v) < 64 * EPS


@pytest.mark.parametrize("form", FORMS)
def test_equal_keys_with_beta_two_alternate(form: str) -> None:
    """beta = 2 reflects: o_t = 2 v_t - o_{t-1}."""
    key = unit(1, 1, 1, 16).expand(1, 64, 1, 16)
    v, beta = torch.randn(1, 64, 1, 8, dtype=torch.float64), torch.full((1, 64, 1), 2.0, dtype=torch.float64)
    output = scan(key, key, v, Householder(key, beta), write=beta, scale=1.0, form=form).output
    expected, last = [], torch.zeros_like(v[:, 0])
    for t in range(64):
        last = 2 * v[:, t] - last
        expected.append(last)
    assert relative(output, torch.stack(expected, dim=1)) < 64 * 64 * EPS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equal_one_hot_keys_are_exact_in_every_precision(dtype: torch.dtype) -> None:
    key = F.one_hot(torch.zeros(1, 64, 1, dtype=torch.long), 16).to(dtype)
    v = torch.randint(-8, 9, (1, 64, 1, 8)).to(dtype)
    beta = torch.ones(1, 64, 1)
    assert torch.equal(scan(key, key, v, Householder(key, beta), write=beta, scale=1.0, form="chunk").output, v)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_reflections_preserve_the_norm_of_the_state_over_4096_tokens(device: str) -> None:
    """Blocks of four channels, beta = 2, nothing written, float32."""
    key = F.normalize(torch.randn(1, 4096, 1, 2, 4), dim=-1).flatten(-2)
    state = torch.randn(1, 1, 8, 8)

    def final_of(key: Tensor, state: Tensor) -> Tensor:
        beta, silent = torch.full_like(key[..., 0], 2.0), torch.zeros_like(key[..., 0])
        transition = BlockDiagonal(Householder(key, beta), 2)
        given = {"write": silent, "initial_state": state, "form": "chunk"}
        assert explain(key, key, torch.zeros_like(key), transition, **given).backend == (
            "triton" if key.is_cuda else "torch"
        )
        return scan(key, key, torch.zeros_like(key), transition, **given).final_state

    final = final_of(key.to(device), state.to(device)).cpu()
    # on a CPU off by 5e-6 and 2e-5 at most; with sums that are cut off, as tensor cores do, by 1.7e-4
    assert float(final.norm() / state.norm()) == pytest.approx(1, abs=1e-4 if device == "cuda" else 2e-5)
    assert relative(final, final_of(key.double(), state.double())) < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_of_zero_equals_no_gate(form: str) -> None:
    key, beta = unit(2, 50, 2, 8), torch.rand(2, 50, 2, dtype=torch.float64)
    q, v = torch.randn(2, 50, 2, 8, dtype=torch.float64), torch.randn(2, 50, 2, 5, dtype=torch.float64)
    plain = scan(q, key, v, Householder(key, beta), write=beta, form=form)
    for gate in (ScalarGate(torch.zeros_like(beta)), DiagonalGate(torch.zeros_like(key))):
        gated = scan(q, key, v, Product(gate, Householder(key, beta)), write=beta, form=form)
        assert relative(gated.output, plain.output) < 64 * EPS
        assert relative(gated.final_state, plain.final_state) < 64 * EPS


@pytest.mark.parametrize("form", FORMS)
def test_count_n_is_the_expanded_sequence_with_the_gate_on_the_first_step(form: str) -> None:
    """20 tokens of 3 steps are 60 tokens of one, read at every third."""
    batch, seq_len, count, num_heads, key_dim, value_dim = 1, 20, 3, 2, 8, 5
    key = unit(batch, seq_len, count, num_heads, key_dim)
    beta = 2 * torch.rand(batch, seq_len, count, num_heads, dtype=torch.float64)
    q = torch.randn(batch, seq_len, num_heads, key_dim, dtype=torch.float64)
    v = torch.randn(batch, seq_len, count, num_heads, value_dim, dtype=torch.float64)
    log_decay = -torch.rand(batch, seq_len, num_heads, dtype=torch.float64)
    short = scan(q, key, v, Product(ScalarGate(log_decay), Householder(key, beta)), write=beta, form=form)

    long_key, long_beta, long_v = key.flatten(1, 2), beta.flatten(1, 2), v.flatten(1, 2)
    on_first = torch.zeros_like(beta)
    on_first[:, :, 0] = log_decay
    transition = Product(ScalarGate(on_first.flatten(1, 2)), Householder(long_key, long_beta))
    expanded = scan(q.repeat_interleave(count, 1), long_key, long_v, transition, write=long_beta, form=form)
    assert relative(short.output, expanded.output[:, count - 1 :: count]) < 64 * EPS
    assert relative(short.final_state, expanded.final_state) < 64 * EPS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("blocks", [2, 4])
def test_blocks_are_separate_heads_that_share_a_value_and_add_their_read_outs(form: str, blocks: int) -> None:
    key = unit(2, 30, 1, blocks, 3).flatten(-2)
    beta = 2 * torch.rand(2, 30, 1, blocks, dtype=torch.float64)
    log_decay = -torch.rand(2, 30, 1, blocks, dtype=torch.float64)
    q, v = torch.randn_like(key), torch.randn(2, 30, 1, 5, dtype=torch.float64)
    inner = Product(ScalarGate(log_decay), Householder(key, beta))
    whole = scan(q, key, v, BlockDiagonal(inner, blocks), write=beta, scale=1.0, form=form)

    heads_key, heads_q = (x.unflatten(-1, (blocks, 3)).squeeze(2) for x in (key, q))
    heads_beta, heads_decay = beta.squeeze(2), log_decay.squeeze(2)
    transition = Product(ScalarGate(heads_decay), Householder(heads_key, heads_beta))
    heads_v = v.expand(-1, -1, blocks, -1)
    heads = scan(heads_q, heads_key, heads_v, transition, write=heads_beta, scale=1.0, form=form)
    assert relative(whole.output, heads.output.sum(2, keepdim=True)) < 64 * EPS
    assert relative(whole.final_state, heads.final_state.transpose(1, 2).flatten(2).unsqueeze(1)) < 64 * EPS


class Forgets(Transition):
    """Diag(1 - beta_t k_t^2), in blocks with the beta of each; its write is beta over the length of the key."""

    key: Key
    beta: Rate

    @property
    def natural_write(self) -> Tensor:
        return self.beta / self.expand_heads(self.beta.shape[-1]).key.norm(dim=-1)

    def apply(self, state: Tensor) -> Tensor:
        return state * (1 - self.beta[..., None] * self.key.square()).unsqueeze(-2)

    def lower(self) -> NormalForm:
        key = self.expand_heads(self.beta.shape[-1]).key
        return NormalForm(log_decay=torch.log1p(-self.beta[..., None] * key.square()))


class Erases(Transition):
    """e^g (I - beta_t k_t k_t^T), with beta beside the erase pair, and a fixed decay that is made, not given."""

    key: UnitKey
    beta: Rate
    log_gamma: Constant

    def apply(self, state: Tensor) -> Tensor:
        decayed = state * (2 * self.log_gamma).exp()[..., None, None]
        read = torch.einsum("...vk,...k->...v", decayed, self.key)
        return decayed - (self.beta[..., None] * read)[..., None] * self.key.unsqueeze(-2)

    def lower(self) -> NormalForm:
        return NormalForm(2 * self.log_gamma, erase=(self.key, self.key), erase_beta=self.beta)


@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", ["forgets", "erases", "product"])
def test_a_transition_that_knows_no_blocks_has_them_nonetheless(name: str, is_shared: bool, num_heads: int) -> None:
    """Every form is the definition, with gradients, and the key of the write is still known as that."""
    key, heads, blocks = unit(2, 20, num_heads, 2, 3).flatten(-2).requires_grad_(), 2, 2
    beta = torch.rand(2, 20, heads, *(() if is_shared else (blocks,)), dtype=torch.float64).requires_grad_()
    gamma = -torch.rand(heads, dtype=torch.float64)
    q, v = torch.randn(2, 20, num_heads, 6, dtype=torch.float64), torch.randn(2, 20, heads, 5, dtype=torch.float64)
    inner: Transition = Erases(key, beta, gamma) if name == "erases" else Forgets(key, beta)
    if name == "product":
        inner = Forgets(key, beta) @ Householder(key, beta)
    transition = BlockDiagonal(inner, blocks)
    erase = transition.lower().erase
    assert erase is None or erase[1] is key
    results = [scan(q, key, v, transition, write=transition.natural_write, form=form) for form in FORMS]
    grads = [torch.autograd.grad([x.square().sum() for x in result], [key, beta]) for result in results]
    for found in (results, grads):
        for x, y in zip(found[0], found[1], strict=True):
            assert relative(y, x) < 1e-12
        for x, y in zip(found[0], found[2], strict=True):
            assert relative(y, x) < 1e-12


@pytest.mark.parametrize("level", [-5.0, -10.0, -20.0])
def test_the_gate_gradient_survives_strong_decay_in_float32(level: float) -> None:
    """As a difference of sums it would be wrong by 440 at -20; limit 1e-3."""
    q, v = torch.randn(1, 256, 1, 32), torch.randn(1, 256, 1, 32)
    key = unit(1, 256, 1, 32).float()

    def gradient(dtype: torch.dtype, form: str) -> Tensor:
        log_decay = torch.full((1, 256, 1), level, dtype=dtype, requires_grad=True)
        output = scan(*(x.to(dtype) for x in (q, key, v)), ScalarGate(log_decay), form=form).output
        return torch.autograd.grad(output.square().sum(), log_decay)[0]

    assert relative(gradient(torch.float32, "chunk"), gradient(torch.float64, "recurrent")) <= 1e-3


@pytest.mark.parametrize("level", [-1.5, -3.0, -6.0, -20.0, -80.0])
def test_channel_decays_beyond_the_range_of_exp_are_finite_and_right(level: float) -> None:
    """q e^G times k e^-G breaks at -1.5 a step in chunks of 64; mixed channels are harsher than uniform ones."""
    q, v, key = torch.randn(1, 64, 1, 8), torch.randn(1, 64, 1, 4), unit(1, 64, 1, 8).float()
    log_decay = torch.where(torch.arange(8) % 2 == 0, level, 0.0).expand(1, 64, 1, 8)
    exact = scan(q.double(), key.double(), v.double(), DiagonalGate(log_decay.double()), form="recurrent").output
    assert relative(scan(q, key, v, DiagonalGate(log_decay), form="chunk").output, exact) <= 1e-5


def test_resets_do_not_lose_small_differences_of_large_sums() -> None:
    """-80 every 8 tokens: a difference of two cumulative sums loses 1.2e-5 in float32 here."""
    q, v, key = torch.randn(1, 64, 1, 8), torch.randn(1, 64, 1, 4), unit(1, 64, 1, 8).float()
    log_decay = torch.where(torch.arange(64) % 8 == 7, -80.0, -0.01)[None, :, None]
    gates: list[tuple[Transition, Transition]] = [
        (ScalarGate(log_decay), ScalarGate(log_decay.double())),
        (
            DiagonalGate(log_decay[..., None].expand(1, 64, 1, 8)),
            DiagonalGate(log_decay.double()[..., None].expand(1, 64, 1, 8)),
        ),
    ]
    for single, double in gates:
        exact = scan(q.double(), key.double(), v.double(), double, form="recurrent").output
        assert relative(scan(q, key, v, single, form="chunk").output, exact) <= 1e-6


def test_linear_attention_over_values_of_one_counts_keys() -> None:
    q = k = v = torch.ones(2, 5, 3, 1)
    expected = torch.arange(1.0, 6.0)[None, :, None, None].expand(2, 5, 3, 1)
    for form in FORMS:
        assert torch.equal(scan(q, k, v, Identity(), scale=1.0, form=form).output, expected)


def test_the_state_stays_float32_for_half_precision_inputs_and_float64_for_double() -> None:
    for dtype, state in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        q, v = torch.randn(1, 20, 1, 4, dtype=dtype), torch.randn(1, 20, 1, 3, dtype=dtype)
        result = scan(q, q, v, Identity())
        assert result.output.dtype == dtype and result.final_state.dtype == state


def test_one_write_after_two_erasures_is_two_steps() -> None:
    directions, beta = unit(1, 12, 2, 1, 6), torch.rand(1, 12, 2, 1, dtype=torch.float64)
    q, k, v = (
        torch.randn(1, 12, 1, 6, dtype=torch.float64),
        unit(1, 12, 1, 6),
        torch.randn(1, 12, 1, 3, dtype=torch.float64),
    )
    first, second = (Householder(directions[:, :, j], beta[:, :, j]) for j in (0, 1))
    one = scan(q, k, v, Householder(directions, beta), form="chunk")
    two = scan(q, k, v, Product(first, second), form="recurrent")
    assert relative(one.output, two.output) < 64 * EPS


@pytest.mark.parametrize("form", FORMS)
def test_a_count_of_one_is_no_count(form: str) -> None:
    """An axis n of size 1, alone, in a product and in blocks; as many rows as heads, so that a wrong broadcast fits."""
    key, beta = unit(2, 5, 2, 4), torch.rand(2, 5, 2, dtype=torch.float64)
    q, v = torch.randn(2, 5, 2, 4, dtype=torch.float64), torch.randn(2, 5, 2, 3, dtype=torch.float64)
    gate = ScalarGate(-beta)
    key1, v1, beta1 = (x.unsqueeze(2) for x in (key, v, beta))
    pairs: list[tuple[Transition, Transition]] = [
        (Householder(key, beta), Householder(key1, beta1)),
        (Product(gate, Householder(key, beta)), Product(gate, Householder(key1, beta1))),
        (BlockDiagonal(Householder(key, beta), 2), BlockDiagonal(Householder(key1, beta1), 2)),
    ]
    for plain, counted in pairs:
        expected = scan(q, key, v, plain, write=beta, form=form)
        result = scan(q, key1, v1, counted, write=beta1, form=form)
        torch.testing.assert_close(result.output, expected.output)
        torch.testing.assert_close(result.final_state, expected.final_state)
        torch.testing.assert_close(counted.at(3).apply(expected.final_state), plain.at(3).apply(expected.final_state))


@pytest.mark.parametrize("form", FORMS)
def test_a_decay_of_zero_is_a_hard_reset(form: str) -> None:
    """log 0 = -inf is a legal log decay: nothing from before survives, and no gradient is NaN."""
    q, k, v = (torch.randn(1, 20, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    log_decay = torch.zeros(1, 20, 1, dtype=torch.float64)
    log_decay[:, 10] = -torch.inf
    for gate in (ScalarGate(log_decay), DiagonalGate(log_decay[..., None].expand(1, 20, 1, 4))):
        output = scan(q, k, v, gate, form=form).output
        alone = scan(q[:, 10:], k[:, 10:], v[:, 10:], Identity(), form=form).output
        torch.testing.assert_close(output[:, 10:], alone)
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(output.sum(), (q, k, v)))


def test_a_product_with_the_identity_has_the_dtype_of_the_other_factor() -> None:
    beta = torch.rand(1, 3, 1, dtype=torch.float64)
    matrix = Householder(unit(1, 3, 1, 4), beta)
    torch.testing.assert_close(Product(Identity(), matrix).materialize(), matrix.materialize())


def test_a_pytree_holds_tensors_only() -> None:
    """The number of blocks is structure, not a leaf: mapping over tensors leaves it alone."""
    transition = BlockDiagonal(ScalarGate(-torch.rand(1, 3, 1)), 2)
    doubled = torch.utils._pytree.tree_map(lambda x: 2 * x, transition)
    assert doubled.blocks == 2 and torch.equal(doubled.inner.log_decay, 2 * transition.inner.log_decay)
