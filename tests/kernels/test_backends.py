"""A backend that was registered runs where it is asked for, or says why not, and nowhere else."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from statemix import explain, scan
from statemix.kernels import (
    Gradients,
    ScanOperands,
    chunk_scan,
    register_backend,
    torch_kernels,
    unregister_backend,
)
from statemix.transitions import BlockDiagonal, DiagonalGate, Householder, Identity, Transition

T, H, HV, K, V = 9, 1, 2, 4, 3


def obstacle(operands: ScanOperands) -> str | None:
    return "it takes no packed documents" if operands.cu_seqlens is not None else None


def forward(operands: ScanOperands, *, scale: float) -> tuple[Tensor, Tensor]:
    return chunk_scan(operands, scale=scale, chunk_size=16)


def forward_saving(operands: ScanOperands, *, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    return *forward(operands, scale=scale), [operands.q + 1]


def backward(
    grad_output: Tensor, grad_final: Tensor, operands: ScanOperands, saved: list[Tensor], *, scale: float
) -> Gradients:
    assert torch.equal(saved[0], operands.q + 1)
    options: Any = {"scale": scale, "needs_decay_grad": True}
    return torch_kernels.backward(grad_output, grad_final, operands, None, **options)


@pytest.fixture
def mine() -> Iterator[None]:
    register_backend("mine", obstacle, forward)
    register_backend("mine_both_ways", obstacle, forward_saving, backward)
    yield
    for name in ("mine", "mine_both_ways"):
        unregister_backend(name)


def arguments(transition: Transition, **changes: Any) -> dict[str, Any]:
    q, k, v = (torch.randn(1, T, *tail, dtype=torch.float64) for tail in ((H, K), (H, K), (HV, V)))
    return {"q": q, "k": k, "v": v, "transition": transition} | changes


def transitions() -> dict[str, Transition]:
    gate, key = (
        -torch.rand(1, T, HV, K, dtype=torch.float64),
        F.normalize(torch.randn(1, T, H, K, dtype=torch.float64), dim=-1),
    )
    beta = torch.rand(1, T, HV, dtype=torch.float64)
    return {
        "gate": DiagonalGate(gate.requires_grad_()),
        "rule": Householder(key.div(2).requires_grad_(), beta.requires_grad_()),
        "blocks": BlockDiagonal(Householder(key.div(2).requires_grad_(), beta.requires_grad_()), 2),
    }


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gate", "rule", "blocks"])
@pytest.mark.parametrize("backend", ["mine", "mine_both_ways"])
def test_results_and_gradients_are_those_of_torch(backend: str, name: str, recompute: bool) -> None:
    transition = transitions()[name]
    given = arguments(transition, initial_state=torch.randn(1, HV, V, K, dtype=torch.float64))
    leaves = [given[x].requires_grad_() for x in ("q", "k", "v", "initial_state")]
    leaves += [x for _, x, _ in transition.tensors()]
    found = []
    for choice in ("torch", backend):
        results = scan(**given, form="chunk", backend=choice, recompute=recompute)
        grads = torch.autograd.grad([x.square().sum() for x in results], leaves)
        found.append([*results, *grads])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("mine")
def test_what_it_cannot_run_is_refused_with_its_reason() -> None:
    for call in (scan, explain):
        with pytest.raises(NotImplementedError, match="'mine' cannot run, it takes no packed documents; use 'torch'"):
            call(**arguments(Identity(), cu_seqlens=torch.tensor([0, T], dtype=torch.int32)), backend="mine")
        with pytest.raises(NotImplementedError, match="'mine' cannot run, it has no form 'recurrent'"):
            call(**arguments(Identity()), backend="mine", form="recurrent")


@pytest.mark.usefixtures("mine")
def test_it_is_explained_where_it_is_asked_for_and_never_taken_unasked() -> None:
    chosen = explain(**arguments(Identity()), backend="mine")
    assert (chosen.form, chosen.backend, chosen.backend_reason) == ("chunk", "mine", "asked for")
    assert explain(**arguments(Identity())).backend == "torch"


@pytest.mark.usefixtures("mine")
def test_a_name_that_is_taken_and_one_that_is_unknown_are_refused_with_the_known_ones() -> None:
    for name in ("auto", "torch", "triton", "mine"):
        with pytest.raises(ValueError, match=f"name: expected one that is not taken, got '{name}'; taken are auto, "):
            register_backend(name, obstacle, forward)
    with pytest.raises(ValueError, match="name: expected a word, got ''"):
        register_backend("", obstacle, forward)
    with pytest.raises(ValueError, match="'triton', 'mine' or 'mine_both_ways', got 'yours'; register_backend adds"):
        scan(**arguments(Identity()), backend="yours")


def test_a_reason_that_is_no_text_is_refused_by_the_name_of_the_backend() -> None:
    register_backend("says_true", lambda operands: True, forward)  # type: ignore[arg-type,return-value]
    try:
        with pytest.raises(TypeError, match="obstacle: expected a reason in words or None of backend 'says_true', got"):
            scan(**arguments(Identity()), backend="says_true")
    finally:
        unregister_backend("says_true")


@pytest.mark.parametrize(("wrong", "message"), [(0, "output: expected"), (1, "final_state: expected")])
def test_results_of_another_shape_are_refused(wrong: int, message: str) -> None:
    def crooked(operands: ScanOperands, *, scale: float) -> tuple[Tensor, Tensor]:
        output, state = forward(operands, scale=scale)
        return (output[1:], state) if wrong == 0 else (output, state.mT)

    register_backend("crooked", lambda operands: None, crooked)
    try:
        with pytest.raises(ValueError, match=message):
            scan(**arguments(Identity()), backend="crooked")
    finally:
        unregister_backend("crooked")


@pytest.mark.usefixtures("mine")
def test_a_second_derivative_through_a_backward_pass_is_refused() -> None:
    given = arguments(Identity())
    output = scan(**given | {"q": given["q"].requires_grad_()}, backend="mine_both_ways").output
    with pytest.raises(NotImplementedError, match="backend 'mine_both_ways' has no second derivative"):
        torch.autograd.grad(output.sum(), given["q"], create_graph=True)


def test_what_is_no_function_is_refused_by_name() -> None:
    given: dict[str, Any] = {"obstacle": obstacle, "forward": forward, "backward": backward}
    for name in given:
        with pytest.raises(TypeError, match=f"{name}: expected a function, got int"):
            register_backend("crooked", **given | {name: 3})


@pytest.mark.parametrize("made", [None, (torch.zeros(1),), (1, 2, 3)])
def test_results_that_are_not_two_tensors_are_refused_with_the_name_of_the_backend(made: Any) -> None:
    register_backend("crooked", lambda operands: None, lambda operands, *, scale: made)
    try:
        with pytest.raises(TypeError, match="forward: expected a tuple of output and final state of backend 'crooked'"):
            scan(**arguments(Identity()), backend="crooked")
    finally:
        unregister_backend("crooked")
