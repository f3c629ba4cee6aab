"""Which backend a scan takes, what it says about it, and the options that belong to it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from statemix import explain, scan, step, validate
from statemix.kernels import NormalForm, availability
from statemix.kernels.launch_config import compile_for
from statemix.transitions import (
    BlockDiagonal,
    DiagonalGate,
    FixedDecay,
    Householder,
    Identity,
    Product,
    Rate,
    ScalarGate,
    Transition,
)
from statemix.transitions.engine import choice

B, T, H, HV, K, V = 1, 40, 1, 2, 6, 4


def arguments(transition: Transition | None = None, *, seq_len: int = T, **changes: Any) -> dict[str, Any]:
    return {
        "q": torch.randn(B, seq_len, H, K),
        "k": torch.randn(B, seq_len, H, K),
        "v": torch.randn(B, seq_len, HV, V),
        "transition": transition or Identity(),
    } | changes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors made inside are on a GPU of the sm_90 family that is not there: shapes, and nothing to read."""
    monkeypatch.setattr(choice, "device_obstacle", lambda device: None)
    with compile_for("sm_90"), FakeTensorMode(), torch.device("cuda"):
        yield


class Rotation(Transition):
    """A plugin without ``lower``."""

    beta: Rate

    def apply(self, state: Tensor) -> Tensor:
        return state.roll(1, dims=-1)


def erases(*count: int) -> Householder:
    return Householder(torch.zeros(B, T, *count, H, K), torch.zeros(B, T, *count, HV))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "the tensors are on the CPU and Triton's interpreter is off"),
        ({"form": "parallel"}, "the parallel form is written in torch only"),
    ],
)
def test_triton_raises_with_the_reason_on_the_cpu(given: dict[str, Any], reason: str) -> None:
    for call in (scan, explain):
        with pytest.raises(NotImplementedError, match=f"backend: 'triton' cannot run, {reason}; use 'torch'"):
            call(**arguments(**given), backend="triton")


@pytest.mark.parametrize(
    ("transition", "given", "reason"),
    [
        (Rotation(torch.zeros(B, T, HV)), {}, "Rotation has no normal form"),
        (Product(erases(2), ScalarGate(torch.zeros(B, T, HV))), {}, "ScalarGate decays after Householder has erased"),
        (Identity(), {"q": torch.zeros(B, T, H, K, requires_grad=True), "form": "recurrent"}, "has no gradients"),
        (Identity(), {"v": torch.zeros(B, T, HV, 513)}, "heads have K = 6 and V = 513, more than 512"),
        (Identity(), {"q": torch.zeros(B, T, H, K).double()}, "q is float64, not float32, bfloat16 or float16"),
    ],
    ids=["no normal form", "a gate after two erasures", "recurrent gradients", "wide heads", "float64"],
)
def test_elsewhere_triton_raises_with_the_reason_and_auto_takes_torch(
    monkeypatch: pytest.MonkeyPatch, transition: Transition, given: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(choice, "device_obstacle", lambda device: None)
    given = arguments(transition, **given)
    for name in "kv":
        given[name] = given[name].to(given["q"].dtype)
    with pytest.raises(NotImplementedError, match=f"'triton' cannot run, .*{reason}"):
        explain(**given, backend="triton", device="cuda")
    chosen = explain(**given, device="cuda")
    assert chosen.backend == "torch" and chosen.backend_reason.startswith("not triton: ")
    assert reason in chosen.backend_reason


def test_auto_is_torch_on_the_cpu_and_triton_is_not_even_imported_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_obstacle", lambda device: pytest.fail("asked"))
    chosen = explain(**arguments())
    assert (chosen.backend, chosen.backend_reason) == ("torch", "the tensors are on the CPU")
    assert explain(**arguments(), backend="torch").backend_reason == "asked for"
    assert explain(**arguments(), device="mps").backend_reason == "the tensors are on mps"


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(availability, "capability", lambda device: (7, 5))
    assert "compute capability 7.5, less than 8.0" in explain(**arguments(), device="cuda").backend_reason


@pytest.mark.parametrize(
    ("seq_len", "has_gradients", "form", "expected"),
    [
        (40, False, "auto", "chunk"),
        (31, False, "auto", "recurrent"),
        (31, True, "auto", "chunk"),
        (1, True, "auto", "chunk"),
        (40, False, "recurrent", "recurrent"),
        (1, False, "chunk", "chunk"),
    ],
)
def test_on_a_gpu_short_runs_without_gradients_are_recurrent(
    monkeypatch: pytest.MonkeyPatch, seq_len: int, has_gradients: bool, form: Any, expected: str
) -> None:
    monkeypatch.setattr(choice, "device_obstacle", lambda device: None)
    gate = (-torch.rand(B, seq_len, HV)).requires_grad_(has_gradients)
    chosen = explain(**arguments(ScalarGate(gate), seq_len=seq_len), form=form, device="cuda")
    assert (chosen.form, chosen.backend) == (expected, "triton")
    with torch.no_grad():
        chosen = explain(**arguments(ScalarGate(gate), seq_len=seq_len), device="cuda")
    assert chosen.form == ("recurrent" if seq_len < 32 else "chunk")


def test_a_question_may_be_asked_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_obstacle", lambda device: None)
    with torch.device("meta"):
        assert explain(**arguments(FixedDecay(torch.zeros(HV))), device="cuda").backend == "triton"


TRANSITIONS = {
    "identity": lambda: Identity(),
    "fixed": lambda: FixedDecay(torch.zeros(HV)),
    "scalar": lambda: ScalarGate(torch.zeros(B, T, HV)),
    "diagonal": lambda: DiagonalGate(torch.zeros(B, T, HV, K)),
    "product": lambda: Product(ScalarGate(torch.zeros(B, T, HV)), DiagonalGate(torch.zeros(B, T, HV, K))),
    "blocks": lambda: BlockDiagonal(ScalarGate(torch.zeros(B, T, HV, 3)), 3),
    "erases": erases,
    "scalar and erases": lambda: Product(ScalarGate(torch.zeros(B, T, HV)), erases()),
    "diagonal and erases twice": lambda: Product(DiagonalGate(torch.zeros(B, T, HV, K)), erases(2)),
    "erases before a gate": lambda: Product(erases(), DiagonalGate(torch.zeros(B, T, HV, K))),
    "blocks that erase": lambda: BlockDiagonal(Product(FixedDecay(torch.zeros(HV)), erases()), 3),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_nothing_is_read_outside_validate(name: str, dtype: torch.dtype) -> None:
    """Fake tensors raise where a value is asked for, be it an offset or a log decay."""
    given = arguments(TRANSITIONS[name](), cu_seqlens=torch.zeros(4, dtype=torch.int32))
    given |= {x: given[x].to(dtype) for x in "qkv"}
    for form in ("chunk", "recurrent", "auto"):
        output, state = scan(**given, form=form, write=torch.zeros(B, T, HV), recompute=True)
        assert (list(output.shape), output.dtype, output.device.type) == ([B, T, HV, V], dtype, "cuda")
        assert (list(state.shape), state.dtype, state.device.type) == ([3, HV, V, K], torch.float32, "cuda")
    with validate(), pytest.raises(DataDependentOutputException):
        scan(**given)


def test_heads_are_as_wide_as_a_block_where_blocks_erase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_obstacle", lambda device: None)
    key, rate = torch.zeros(B, T, H, 1024), torch.zeros(B, T, HV)
    for blocks, backend in ((1, "torch"), (2, "triton")):
        given = arguments(BlockDiagonal(Householder(key, rate), blocks), q=key, k=key)
        assert explain(**given, device="cuda").backend == backend


def test_the_direction_that_is_erased_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_obstacle", lambda device: None)
    given = arguments(erases())
    assert explain(**given, device="cuda").reason == "erases along a direction of its own, then writes"
    assert explain(**given | {"k": given["transition"].direction}, device="cuda").reason == "erases along the write key"
    assert explain(**arguments(), device="cuda").reason == "no erasure"


def test_what_triton_runs_is_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Identity):
        def lower(self) -> NormalForm:
            calls.append(1)
            return super().lower()

    calls: list[int] = []
    monkeypatch.setattr(choice, "device_obstacle", lambda device: None)
    with compile_for("sm_90"), FakeTensorMode(), torch.device("cuda"):
        scan(**arguments(Counted()))
    assert len(calls) == 1


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_a_step_runs_by_triton() -> None:
    given = arguments(ScalarGate(torch.zeros(B, 1, HV)), seq_len=1)
    assert explain(**given, form="recurrent").backend == "triton"
    assert step(**given, state=torch.zeros(B, HV, V, K)).output.shape == (B, 1, HV, V)


@pytest.mark.usefixtures("gpu")
def test_documents_on_another_device_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cu_seqlens: expected device cuda.* as q has, got cpu; move it"):
        scan(**arguments(), cu_seqlens=torch.zeros(4, dtype=torch.int32, device="cpu"))


@pytest.mark.parametrize("form", ["recurrent", "chunk", "parallel"])
@pytest.mark.parametrize("packed", [False, True])
def test_recomputing_changes_no_bit_of_results_and_gradients(form: Any, packed: bool) -> None:
    key = torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1).requires_grad_()
    beta, gate = torch.rand(B, T, HV).requires_grad_(), (-torch.rand(B, T, HV)).requires_grad_()
    given = arguments(Product(ScalarGate(gate), Householder(key, beta)), k=key, write=beta, form=form)
    given["cu_seqlens"] = torch.tensor([0, 0, 17, 33], dtype=torch.int32) if packed else None
    leaves = (given["q"].requires_grad_(), given["v"].requires_grad_(), key, beta, gate)
    upstream = torch.randn(B, T, HV, V)

    def run(recompute: bool) -> list[Tensor]:
        output, state = scan(**given, recompute=recompute)
        return [output, state, *torch.autograd.grad([output, state], leaves, [upstream, torch.ones_like(state)])]

    assert all(torch.equal(x, y) for x, y in zip(run(False), run(True), strict=True))


def test_recomputing_keeps_the_inputs_alone() -> None:
    given = arguments(DiagonalGate(-torch.rand(B, T, HV, K)))
    given["v"].requires_grad_()
    kept: dict[bool, int] = {}
    for recompute in (False, True):
        sizes: dict[int, int] = {}

        def keep(x: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            scan(**given, recompute=recompute)
        kept[recompute] = sum(sizes.values())
    assert kept[True] == 0 < kept[False]  # what a checkpoint holds are the arguments themselves


def test_a_compiler_takes_a_recomputed_scan_whole() -> None:
    given = arguments(ScalarGate((-torch.rand(B, T, HV)).requires_grad_()))
    given["v"].requires_grad_()
    compiled = torch.compile(lambda **given: scan(**given, recompute=True), backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(run(**given).output.sum(), given["v"])[0] for run in (compiled, scan)]
    torch.testing.assert_close(*grads)


@pytest.mark.gpu
@pytest.mark.parametrize("erases", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_runs_without_waiting_for_it_and_gives_what_torch_gives(dtype: torch.dtype, erases: bool) -> None:
    with torch.device("cuda"):
        gate = -torch.rand(B, T, HV, K)
        offsets = torch.tensor([0, 0, 10, 37], dtype=torch.int32)
        given = arguments(DiagonalGate(gate), cu_seqlens=offsets)
        given["k"] = torch.nn.functional.normalize(given["k"], dim=-1)
        beta = torch.rand(B, T, HV)
    given |= {x: given[x].to(dtype).requires_grad_() for x in "qkv"}
    if erases:
        given["transition"] = Product(DiagonalGate(gate), Householder(given["k"], beta))

    def run(backend: Any) -> list[Tensor]:
        output, state = scan(**given, backend=backend)
        return [output, state, *torch.autograd.grad(output.float().sum() + state.sum(), [given[x] for x in "qkv"])]

    assert explain(**given).backend == "triton"
    run("auto")  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = run("auto")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for x, y in zip(results, run("torch"), strict=True):
        assert (x - y).norm() <= (2e-2 if dtype == torch.bfloat16 else 1e-5) * y.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("erases", [False, True])
def test_a_compiler_on_a_gpu_takes_the_kernels_whole(erases: bool) -> None:
    with torch.device("cuda"):
        given = arguments(ScalarGate((-torch.rand(B, T, HV)).requires_grad_()))
        given["k"] = torch.nn.functional.normalize(given["k"], dim=-1)
        if erases:
            given["transition"] = Product(given["transition"], Householder(given["k"], torch.rand(B, T, HV)))
    compiled = torch.compile(scan, fullgraph=True)
    for run in (compiled, scan):
        results = run(**given)
    for x, y in zip(compiled(**given), results, strict=True):
        torch.testing.assert_close(x, y)
