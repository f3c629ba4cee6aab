"""What makes a transition inside a mixer: names, initialisations, gate formulas and writes."""

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.nn import functional as F

from statemix.transitions import (
    BlockDiagonal,
    FixedDecayModule,
    HeadSizes,
    Householder,
    ScalarGateModule,
    Transition,
    TransitionModule,
    TransitionSpec,
    build_transition,
)
from statemix.transitions.modules.decay_rate import LogSigmoidDecay, SoftplusDecay
from statemix.transitions.modules.registry import ALIASES

SIZES = HeadSizes(hidden_size=24, num_heads=2, num_value_heads=4, key_dim=8)
SPEC: TypeAdapter[Any] = TypeAdapter(TransitionSpec)


def module(spec: Any) -> TransitionModule:
    return build_transition(SPEC.validate_python(spec), SIZES)


def make(spec: Any) -> tuple[Transition, Tensor | None, Tensor]:
    made = module(spec)
    count = (made.num_writes,) if made.num_writes > 1 else ()
    key = F.normalize(torch.randn(2, 5, *count, 2, 8), dim=-1)
    transition, write = made(torch.randn(2, 5, 24), key)
    return transition, write, key


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_makes_a_transition_in_range(alias: str) -> None:
    transition, _, _ = make(alias)
    for name, x, kind in transition.tensors():
        assert bool((x <= kind.high).all() and (x >= kind.low).all()), name
    eigenvalues = torch.linalg.eigvals(transition.materialize(8).detach().double())
    assert float(eigenvalues.abs().max()) <= 1 + 1e-5  # keys of unit length in float32


def test_the_delta_rule_erases_along_the_very_write_key_and_writes_beta() -> None:
    transition, write, key = make("deltanet")
    assert isinstance(transition, Householder)
    assert transition.direction is key and write is transition.beta


def test_the_write_of_mamba2_is_its_step_size_and_that_of_a_gated_delta_rule_is_beta() -> None:
    transition, write, _ = make("mamba2")
    assert write is not None and "log_decay" in {name for name, _, _ in transition.tensors()}
    assert bool((write > 0).all())
    transition, write, _ = make("gated_deltanet")
    assert write is next(x for name, x, _ in transition.tensors() if name == "right.beta")
    assert make("gla")[1] is None and make("retnet")[1] is None


def test_retnet_forgets_at_one_minus_two_to_the_minus_five_minus_h() -> None:
    gamma = FixedDecayModule(FixedDecayModule.Config(), SIZES).log_decay.double().exp()
    assert gamma.tolist() == pytest.approx([1 - 2.0 ** (-5 - h) for h in range(4)], rel=1e-7)


def test_the_rates_of_softplus_gates_start_where_mamba2_starts_them() -> None:
    """A uniform in [1, 16], dt log-uniform in [1e-3, 0.1]: 4096 heads fill both ranges."""
    decay = SoftplusDecay(4096)
    rate, dt = decay.A_log.exp(), F.softplus(decay.dt_bias)
    assert 1 <= rate.min() and rate.max() <= 16 and abs(rate.mean() - 8.5) < 0.3
    assert 1e-3 * 0.999 <= dt.min() and dt.max() <= 0.1 * 1.001
    assert abs(dt.log().mean() - math.log(1e-2)) < 0.1
    assert all(p.no_weight_decay for p in decay.parameters())


@pytest.mark.parametrize("raw", [-30.0, -1.0, 0.0, 19.9, 20.1, 60.0])
def test_the_softplus_gate_is_its_formula_and_so_is_its_gradient(raw: float) -> None:
    decay = SoftplusDecay(1).double()
    x = torch.tensor([raw], dtype=torch.float64, requires_grad=True)
    log_decay, dt = decay(x)
    shifted, rate = raw + decay.dt_bias.item(), decay.A_log.exp().item()
    assert dt.item() == pytest.approx(math.log1p(math.exp(-abs(shifted))) + max(shifted, 0), rel=1e-9)
    assert log_decay.item() == pytest.approx(-rate * dt.item(), rel=1e-12)
    log_decay.backward()
    assert x.grad is not None and x.grad.item() == pytest.approx(-rate / (1 + math.exp(-shifted)), rel=1e-8)


@pytest.mark.parametrize("A_log", [0.0, 10.0, 50.0, 88.0])
def test_a_huge_learned_rate_gives_finite_gates_and_gradients(A_log: float) -> None:
    decay = SoftplusDecay(20)
    torch.nn.init.constant_(decay.A_log, A_log)
    x = torch.tensor([-50.0, 0.0, 50.0]).repeat(7)[:20].requires_grad_()
    log_decay = decay(x)[0].clamp_min(-1e4)
    log_decay.sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_the_two_gate_formulas_go_by_different_names_and_give_their_own_values() -> None:
    x = torch.tensor([-1.3], dtype=torch.float64)
    assert LogSigmoidDecay(16.0)(x)[0].item() == pytest.approx(-math.log1p(math.exp(1.3)) / 16, rel=1e-12)
    softplus = SoftplusDecay(1).double()
    torch.nn.init.constant_(softplus.A_log, 0.7)
    torch.nn.init.constant_(softplus.dt_bias, 0.0)
    assert softplus(x)[0].item() == pytest.approx(-math.exp(0.7) * math.log1p(math.exp(-1.3)), rel=1e-12)


def test_gates_are_computed_in_float32_under_autocast() -> None:
    gate = ScalarGateModule(ScalarGateModule.Config(), SIZES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        transition, _ = gate(torch.randn(1, 3, 24), torch.empty(0))
    assert transition.log_decay.dtype == torch.float32


def test_a_block_diagonal_transition_makes_rates_for_every_block() -> None:
    spec = {"type": "block_diagonal", "blocks": 2, "inner": "gated_deltanet"}
    transition, write, _ = make(spec)
    assert isinstance(transition, BlockDiagonal) and transition.blocks == 2
    assert write is not None and list(write.shape) == [2, 5, 4, 2]
    assert module(spec).needs_unit_keys and module(spec).blocks == 2


def test_resetting_gives_the_same_parameters_for_the_same_seed_also_after_the_meta_device() -> None:
    for alias in (*ALIASES, "block_diagonal"):
        spec = {"type": "block_diagonal", "inner": "kda"} if alias == "block_diagonal" else alias
        with torch.device("meta"):
            empty = module(spec)
        empty.to_empty(device="cpu")
        whole = module(spec)
        for made in (empty, whole):
            torch.manual_seed(3)
            made.reset_parameters()
        for (name, x), (_, y) in zip(empty.state_dict().items(), whole.state_dict().items(), strict=True):
            assert torch.equal(x, y), f"{alias}: {name}"


def test_a_spec_survives_its_own_dump() -> None:
    specs = [*ALIASES, ["scalar_gate", {"type": "householder", "count": 2, "max_beta": 2.0}], {"type": "kda"}]
    for spec in specs:
        validated = SPEC.validate_python(spec)
        assert SPEC.validate_python(SPEC.dump_python(validated, mode="json")) == validated


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("deltanett", "expected one of"),
        ({"type": "householder", "cuont": 2}, "Extra inputs"),
        ({"type": "householder", "count": True}, "valid integer"),
        ({"type": "householder", "max_beta": 3.0}, "less than or equal to 2"),
        ({"type": "scalar_gate", "formula": "logsigmoid", "write": "dt"}, "softplus"),
        ({"type": "block_diagonal", "blocks": 2}, "Field required"),
        ([], "expected a name"),
        (3, "expected a name"),
    ],
)
def test_a_bad_spec_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SPEC.validate_python(spec)


def test_sizes_that_do_not_divide_and_two_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks: expected a divisor of key_dim 8, got 3"):
        module({"type": "block_diagonal", "blocks": 3, "inner": "householder"})
    with pytest.raises(ValueError, match="at most one factor with count > 1"):
        module([{"type": "householder", "count": 2}, {"type": "householder", "count": 2}])


def test_the_formula_says_what_the_transition_is() -> None:
    assert module("gated_deltanet").formula == "alpha_t I (I - beta_t k_t k_t^T)"
    assert module("deltaproduct").formula == "prod_{j <= 2} (I - beta_tj k_tj k_tj^T)"
    assert module({"type": "block_diagonal", "inner": "deltanet"}).formula == "diag(2 x [I - beta_t k_t k_t^T])"
