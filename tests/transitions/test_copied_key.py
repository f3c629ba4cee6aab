"""A direction that is the write key in another tensor costs no second micro-step, or a warning says that it does."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from statemix import explain, scan, validate
from statemix.kernels import NormalForm
from statemix.transitions import Householder, Product, ScalarGate
from statemix.transitions.engine import choice

T, H, K, V = 12, 2, 4, 3
ALONG = "erases along the write key"


def keys() -> Tensor:
    return F.normalize(torch.randn(1, T, H, K, dtype=torch.float64), dim=-1)


def given(k: Tensor, direction: Tensor) -> dict[str, object]:
    torch.manual_seed(0)
    q, v = torch.randn(1, T, H, K).to(k.dtype), torch.randn(1, T, H, V).to(k.dtype)
    gate, beta = -torch.rand(1, T, H), torch.rand(1, T, H)
    return {
        "q": q,
        "k": k,
        "v": v,
        "transition": Product(ScalarGate(gate), Householder(direction, beta)),
        "write": beta,
    }


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda k: k,
    "a view": lambda k: k[:],
    "detached": lambda k: k.detach(),
    "a clone": lambda k: k.clone(),
    "made again": lambda k: torch.tensor(k.tolist(), dtype=k.dtype),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_gradients_a_copy_is_taken_for_the_key(name: str, dtype: torch.dtype) -> None:
    k = keys().to(dtype)
    wanted = scan(**given(k, k), form="chunk")  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arguments = given(k, COPIES[name](k))
        assert explain(**arguments).reason == ALONG  # type: ignore[arg-type]
        got = scan(**arguments, form="chunk")  # type: ignore[arg-type]
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_views_of_one_tensor_are_one_key_with_gradients_too() -> None:
    found = []
    for direction in (lambda k: k, lambda k: k[:], lambda k: k.view_as(k)):
        leaf = keys_of(0).requires_grad_()
        k = leaf * 1
        arguments = given(k, direction(k))
        assert explain(**arguments).reason == ALONG  # type: ignore[arg-type]
        output, _ = scan(**arguments, form="chunk")  # type: ignore[arg-type]
        found.append(torch.autograd.grad(output.square().sum(), leaf)[0])
    assert all(torch.equal(x, found[0]) for x in found)


def keys_of(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return keys()


@pytest.mark.parametrize("name", ["a clone", "detached", "made again"])
def test_a_copy_with_a_gradient_of_its_own_keeps_it_and_a_warning_says_what_it_costs(name: str) -> None:
    """k and the direction get what each of them gives, as in the definition: two micro-steps a token."""
    k = keys().requires_grad_()
    direction = COPIES[name](k)
    direction = direction if direction.requires_grad else direction.requires_grad_()
    arguments = given(k, direction)
    assert "a copy of the write key" in explain(**arguments).reason  # type: ignore[arg-type]
    grads = []
    for form in ("chunk", "recurrent"):
        with pytest.warns(UserWarning, match=r"right\.direction: expected the write key k itself.*two micro-steps"):
            output, _ = scan(**arguments, form=form)  # type: ignore[arg-type]
        grads.append(torch.autograd.grad(output.square().sum(), [direction, k], retain_graph=True))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_another_direction_is_no_copy() -> None:
    with warnings.catch_warnings(), validate():
        warnings.simplefilter("error")
        arguments = given(keys().requires_grad_(), keys())
        scan(**arguments)  # type: ignore[arg-type]
    assert explain(**arguments).reason == "erases along a direction of its own, then writes"  # type: ignore[arg-type]


def test_kernels_take_one_micro_step_for_a_view_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "device_obstacle", lambda device: None)
    monkeypatch.setattr(choice, "size_obstacle", lambda *sizes: None)
    k = keys()
    inputs = choice.ScanInputs(**given(k, k[:]), initial=None, cu_seqlens=None)  # type: ignore[arg-type]
    operands = choice.operands_of(inputs)
    assert operands.num_steps == 1 and operands.a is None and operands.b is k
    form = NormalForm(erase=(2 * k, k.clone())).along(k)
    assert form.erase is not None and form.erase[1] is k


def test_derivatives_by_transforms_are_those_of_two_tensors_also_where_they_are_equal() -> None:
    k = keys()
    tangents = torch.randn_like(k), torch.randn_like(k)

    def output(k: Tensor, direction: Tensor, form: str) -> Tensor:
        return scan(**given(k, direction), form=form, backend="torch").output.square().sum()  # type: ignore[arg-type]

    for direction in (k.clone(), keys()):
        found = {
            form: (
                *torch.func.grad(output, argnums=(0, 1))(k, direction, form),
                torch.func.grad(lambda k, u=direction, form=form: output(k, u, form))(k),
                torch.func.jvp(lambda k, u, form=form: output(k, u, form), (k, direction), tangents)[1],
            )
            for form in ("chunk", "recurrent")
        }
        torch.testing.assert_close(*found.values(), rtol=1e-10, atol=1e-10)
