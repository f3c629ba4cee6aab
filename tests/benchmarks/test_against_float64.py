"""The comparison with float64: right calls pass, and each planted fault is found and named."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from statemix import ScanResult, scan
from statemix.benchmarks import against_float64
from statemix.benchmarks.against_float64 import (
    Case,
    Finding,
    check_case,
    nan_in_fresh_memory,
    relative_error,
    same_bits,
)
from statemix.benchmarks.ops import OPS, find_ops

PACKED = Case("packed", 1, 40, offsets=(0, 0, 5, 23, 33), gates="mixed")
CASES = (
    Case("t1", 2, 1),
    Case("strong", 2, 17, gates="strong"),
    Case("resets", 1, 30, gates="resets", is_strided=True, scale=0.3),
    Case("stateless", 2, 9, has_state=False, has_narrow_gates=True),
    Case("zero", 2, 9, 3, 3, gates="zero", options=(("recompute", True),)),
    Case("recurrent", 1, 20, form="recurrent"),
    Case("to two", 2, 17, rates="to two"),
    Case("equal", 1, 40, gates="zero", rates="one", has_equal_keys=True),
    Case("equal two", 1, 40, gates="zero", rates="two", has_equal_keys=True),
    PACKED,
)


def check(op: str, case: Case, dtype: torch.dtype = torch.float32) -> Finding:
    [row] = find_ops((op,))
    return check_case(row, case, key_dim=8, value_dim=6, dtype=dtype, device=torch.device("cpu"), backend="torch")


@pytest.mark.parametrize("op", OPS)
def test_a_right_call_passes_with_every_gradient(op: str) -> None:
    for case in CASES:
        finding = check(op, case)
        assert finding.faults == (), case.name
        if case.form == "chunk":
            inputs = {"q", "k", "v", *OPS[op].uses, *(["initial_state"] if case.has_state else [])}
            assert finding.errors.keys() == {"output", "final_state", *(f"d {name}" for name in inputs)}


def test_equal_keys_are_exact_and_rates_stay_where_no_state_can_grow() -> None:
    sizes = {"value_dim": 6, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    case = Case("equal", 1, 300, rates="two", has_equal_keys=True)
    for op in OPS.values():
        for key_dim in (8, 100, 260):
            x = against_float64.make_problem(op, case, key_dim=key_dim, **sizes).operands
            by_block = x.k.double().unflatten(-1, (op.blocks, -1))
            assert bool((by_block.square().sum(-1) == 1).all()) and torch.equal(x.k, x.direction)
            assert bool((x.beta == (2 if op.max_beta == 2 else 1)).all()) and bool((x.channel_rate == 1).all())
        final = against_float64.reference(
            op, replace(case, gates="zero"), against_float64.make_problem(op, case, key_dim=8, **sizes)
        )
        assert float(final["final_state"].abs().max()) < 300, op.name


def test_bfloat16_is_compared_on_the_rounded_inputs() -> None:
    finding = check("gla", PACKED, torch.bfloat16)
    assert finding.faults == () and 1e-4 < finding.errors["output"] < 8e-3


def unwritten(result: ScanResult) -> Tensor:
    output = torch.empty_like(result.output)  # NaN here; elsewhere perhaps what an earlier run left
    output[:, :-1] = result.output[:, :-1]
    return output


TURNS = itertools.count()
SLIPS: dict[str, tuple[Callable[[ScanResult], Tensor], str]] = {
    "a small error": (lambda r: r.output * (1 + 2e-5), "output: error 2.0e-05 over 1e-05"),
    "a wrong gradient": (lambda r: r.output + (r.output.detach() - r.output) * 1e-3, "d q: error 1.0e-03"),
    "an unwritten row": (unwritten, "output: error inf"),
    "a race": (lambda r: r.output * (1 + 1e-6 * next(TURNS)), "output: two runs differ"),
    "a row of no document": (lambda r: r.output + 1e-9, "output: not 0 after the last document"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_planted_fault_is_named(slip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, named = SLIPS[slip]

    def faulty(q: Tensor, *args: Any, **options: Any) -> ScanResult:
        result = scan(q, *args, **options)
        return result if q.dtype == torch.float64 else ScanResult(make(result), result.final_state)

    monkeypatch.setattr(against_float64, "scan", faulty)
    assert any(fault.startswith(named) for fault in check("mamba2", PACKED).faults)


def test_a_call_that_writes_into_its_inputs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> ScanResult:
        if q.dtype != torch.float64:
            v.data[:, 0] += 1
        return scan(q, k, v, *args, **options)

    monkeypatch.setattr(against_float64, "scan", faulty)
    assert "v: changed by the call" in check("retnet", replace(PACKED, is_strided=True)).faults


def test_fresh_memory_is_nan_inside_and_settings_are_as_before() -> None:
    with nan_in_fresh_memory():
        assert bool(torch.empty(100).isnan().all()) and bool(torch.ones(2).new_empty(100).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_errors_are_relative_and_never_hide_a_nan() -> None:
    zero, one = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    assert relative_error(one * 1.5, one) == pytest.approx(0.5)
    assert relative_error(zero, zero) == 0
    assert relative_error(one * 1e-30, zero) == float("inf")
    assert relative_error(one * torch.nan, one) == float("inf")
    assert not same_bits(zero, -zero) and same_bits(one * torch.nan, one * torch.nan)
    strided = torch.zeros(3, 2)[:, :1]  # contiguous to torch, though the last stride is no 1
    assert same_bits(strided, torch.zeros(3, 1))


def test_a_sum_that_cancels_by_chance_is_held_to_the_size_of_its_shares() -> None:
    [retnet] = find_ops(("retnet",))
    case = Case("t40", 3, 40)
    sizes = {"key_dim": 8, "value_dim": 6, "dtype": torch.float64, "device": torch.device("cpu")}
    problem = against_float64.make_problem(retnet, case, **sizes)
    shares = against_float64._size_of_shares(retnet, case, problem)
    total = float(against_float64.reference(retnet, case, problem)["d fixed_decay"].norm())
    assert total / 10 < shares < 10 * total  # 120 tokens a head
    assert relative_error(torch.ones(1), torch.zeros(1, dtype=torch.float64), least_size=4.0) == 0.25


def test_inputs_lie_between_nans() -> None:
    x = against_float64.guarded(torch.ones(2, 5))
    around = torch.as_strided(x, (10 + 2 * against_float64.GUARD,), (1,), 0)
    assert bool(x.eq(1).all()) and x.is_contiguous()
    assert int(around.isnan().sum()) == 2 * against_float64.GUARD
