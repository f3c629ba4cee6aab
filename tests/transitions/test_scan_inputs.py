"""Bad arguments of a scan are refused by name before anything runs."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from statemix import explain, scan, step, validate
from statemix.transitions import (
    BlockDiagonal,
    DiagonalGate,
    FixedDecay,
    Householder,
    Identity,
    Product,
    ScalarGate,
    Transition,
)

B, T, H, HV, K, V = 2, 5, 2, 4, 6, 3


def unit(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def arguments(**changes: Any) -> dict[str, Any]:
    given = {
        "q": torch.randn(B, T, H, K),
        "k": unit(B, T, H, K),
        "v": torch.randn(B, T, HV, V),
        "transition": Identity(),
    }
    return given | changes


REFUSED: list[tuple[str, Callable[[], dict[str, Any]], str]] = [
    ("q without time", lambda: arguments(q=torch.randn(B, H, K)), r"q: expected \[B, T, H, K\]"),
    (
        "no tokens",
        lambda: {n: x[:, :0] if n != "transition" else x for n, x in arguments().items()},
        "q: expected .* none of them 0",
    ),
    ("k of another length", lambda: arguments(k=unit(B, T + 1, H, K)), "k: expected"),
    ("k of another key_dim", lambda: arguments(k=unit(B, T, H, K + 1)), "k: expected"),
    ("v of another length", lambda: arguments(v=torch.randn(B, T + 1, HV, V)), "v: expected"),
    ("v without the writes of k", lambda: arguments(k=unit(B, T, 3, H, K)), "v: expected 5 axes"),
    ("heads that do not divide", lambda: arguments(v=torch.randn(B, T, 3, V)), "multiple of the 2 key heads, got 3"),
    ("fewer value heads", lambda: arguments(v=torch.randn(B, T, 1, V)), "multiple of the 2 key heads, got 1"),
    ("write per key head", lambda: arguments(write=torch.rand(B, T, H)), "write: expected"),
    ("gate with heads first", lambda: arguments(transition=ScalarGate(-torch.rand(B, HV, T))), "ScalarGate.log_decay"),
    ("gate per key head", lambda: arguments(transition=ScalarGate(-torch.rand(B, T, H))), "ScalarGate.log_decay"),
    (
        "channel gate of V",
        lambda: arguments(transition=DiagonalGate(-torch.rand(B, T, HV, V))),
        "DiagonalGate.log_decay",
    ),
    ("fixed decay per token", lambda: arguments(transition=FixedDecay(-torch.rand(T, HV))), "FixedDecay.log_decay"),
    (
        "beta per key head",
        lambda: arguments(transition=Householder(unit(B, T, H, K), torch.rand(B, T, H))),
        "Householder.beta",
    ),
    (
        "more writes than steps",
        lambda: arguments(
            k=unit(B, T, 2, H, K),
            v=torch.randn(B, T, 2, HV, V),
            transition=Householder(unit(B, T, H, K), torch.rand(B, T, HV)),
        ),
        "k: expected 1 writes a token or one, as Householder takes 1 steps, got 2",
    ),
    (
        "state of another head count",
        lambda: arguments(initial_state=torch.zeros(B, H, V, K)),
        "initial_state: expected",
    ),
    ("state transposed", lambda: arguments(initial_state=torch.zeros(B, HV, K, V)), "initial_state: expected"),
    ("mixed dtypes", lambda: arguments(v=torch.randn(B, T, HV, V).bfloat16()), "v: expected torch.float32 beside q"),
    ("a double gate", lambda: arguments(transition=ScalarGate(-torch.rand(B, T, HV).double())), "log_decay: expected"),
    ("integer q", lambda: arguments(q=torch.ones(B, T, H, K, dtype=torch.long)), "q: expected a floating-point dtype"),
    (
        "cu_seqlens with a batch",
        lambda: arguments(cu_seqlens=torch.tensor([0, T], dtype=torch.int32)),
        "cu_seqlens: expected batch 1",
    ),
    (
        "a chunk size of 48",
        lambda: arguments(chunk_size=48),
        "chunk_size: expected a power of two from 16 to 128, got 48",
    ),
    (
        "an unknown form",
        lambda: arguments(form="fast"),
        "form: expected 'auto', 'recurrent', 'chunk' or 'parallel', got 'fast'",
    ),
    (
        "an unknown backend",
        lambda: arguments(backend="cuda"),
        "backend: expected 'auto', 'torch' or 'triton', got 'cuda'",
    ),
    (
        "a positive log decay",
        lambda: arguments(transition=ScalarGate(torch.full((B, T, HV), 0.1))),
        "log decays <= 0, got 0.1",
    ),
    ("no key channels", lambda: arguments(q=torch.randn(B, T, H, 0), k=torch.randn(B, T, H, 0)), "q: expected"),
    ("no writes", lambda: arguments(k=torch.randn(B, T, 0, H, K), v=torch.randn(B, T, 0, HV, V)), "k: expected"),
    ("a list for q", lambda: arguments(q=[1.0]), "q: expected a tensor, got list"),
    ("a number for write", lambda: arguments(write=0.5), "write: expected a tensor or None, got float"),
    ("a class for a transition", lambda: arguments(transition=Identity), "transition: expected a Transition"),
]


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_bad_argument_is_refused_by_name(make: Callable[[], dict[str, Any]], message: str) -> None:
    given = make()
    with pytest.raises(ValueError, match=message):
        scan(given.pop("q"), given.pop("k"), given.pop("v"), given.pop("transition"), **given)


@pytest.mark.parametrize("offsets", [[1, 5], [0, 4, 3], [0, 6]])
def test_offsets_must_rise_from_zero_to_at_most_the_length(offsets: list[int]) -> None:
    q, k, v = torch.randn(1, T, H, K), unit(1, T, H, K), torch.randn(1, T, HV, V)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets that rise from 0 to at most T = 5"):
        scan(q, k, v, Identity(), cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seqlens: expected int32"):
        scan(q, k, v, Identity(), cu_seqlens=torch.tensor([0, 5]))


def test_a_backend_that_cannot_run_raises_with_its_reason() -> None:
    given = arguments(backend="triton")
    with pytest.raises(NotImplementedError, match="backend: 'triton' cannot run"):
        scan(**given)


def test_an_explicit_form_never_falls_back() -> None:
    """A gate after several erasures has no normal form: auto runs the definition, chunk raises and names the factor."""
    beta = torch.rand(B, T, 2, HV)
    key = unit(B, T, 2, H, K)
    late_gate = Product(Householder(key, beta), ScalarGate(-torch.rand(B, T, HV)))
    given = arguments(k=key, v=torch.randn(B, T, 2, HV, V), transition=late_gate, write=beta)
    with pytest.raises(NotImplementedError, match="ScalarGate decays after Householder has erased"):
        scan(**given, form="chunk")
    assert explain(**given).form == "recurrent"
    assert "ScalarGate" in explain(**given).reason
    scan(**given)


def test_a_product_with_an_erasure_across_blocks_runs_the_definition() -> None:
    """An erasure over all of K is no matrix of blocks; a gate without blocks is one of any number of blocks."""
    key, beta, gate = unit(B, T, H, K), torch.rand(B, T, HV), -torch.rand(B, T, HV)
    in_blocks = BlockDiagonal(Householder(key, beta), 2)
    for refused in (Product(in_blocks, Householder(key, beta)), Product(Householder(key, beta), in_blocks)):
        with pytest.raises(NotImplementedError, match="blocks has no normal form"):
            scan(**arguments(k=key, transition=refused), form="chunk")
    scan(**arguments(k=key, transition=Product(ScalarGate(gate), in_blocks)), form="chunk")


def test_explain_says_which_direction_is_erased() -> None:
    beta, key = torch.rand(B, 20, HV), unit(B, 20, H, K)
    q, v = torch.randn(B, 20, H, K), torch.randn(B, 20, HV, V)
    assert "write key" in explain(q, key, v, Householder(key, beta)).reason
    assert "write key" in explain(q, key, v, Householder(key.clone(), beta)).reason
    assert "direction of its own" in explain(q, key, v, Householder(unit(B, 20, H, K), beta)).reason
    assert "tokens" in explain(q[:, :1], key[:, :1], v[:, :1], Identity()).reason


def test_a_positive_log_decay_is_refused_on_any_device_inside_validate() -> None:
    with validate(), pytest.raises(ValueError, match="take -x or a log-sigmoid"):
        scan(**arguments(transition=Product(ScalarGate(torch.full((B, T, HV), 176.0)), Identity())))


def test_long_directions_are_warned_of_and_zero_or_short_ones_are_not() -> None:
    beta = torch.rand(B, T, HV)
    key = unit(B, T, H, K)
    with pytest.warns(UserWarning, match="expected vectors of length 1, got 3"):
        scan(**arguments(k=3 * key, transition=Householder(3 * key, beta)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scan(**arguments(transition=Householder(torch.zeros_like(key), beta)))
        blocks = unit(B, T, H, 2, K // 2).flatten(-2)
        scan(**arguments(k=blocks, transition=BlockDiagonal(Householder(blocks, beta), 2)))


def test_blocks_must_divide_the_key_dim_and_do_not_nest() -> None:
    with pytest.raises(ValueError, match="blocks: expected a divisor of key_dim 6, got 4"):
        BlockDiagonal(Householder(unit(B, T, H, K), torch.rand(B, T, HV)), 4)
    with pytest.raises(ValueError, match="blocks: expected a divisor of key_dim 6, got 4"):
        scan(**arguments(transition=BlockDiagonal(Identity(), 4)))
    with pytest.raises(ValueError, match="without blocks"):
        BlockDiagonal(BlockDiagonal(Identity(), 2), 3)


def test_a_step_takes_one_token() -> None:
    with pytest.raises(ValueError, match=r"q: expected \[B, 1, H, K\]"):
        given = arguments()
        step(given["q"], given["k"], given["v"], Identity(), state=torch.zeros(B, HV, V, K))


def test_a_matrix_without_a_key_dimension_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="key_dim: expected an integer, got None; ScalarGate holds no key dimension"):
        ScalarGate(-torch.rand(B, T, HV)).materialize()


def test_a_transition_without_apply_cannot_be_made() -> None:
    class Nothing(Transition):
        pass

    with pytest.raises(TypeError, match="apply"):
        Nothing()


def test_fewer_tokens_than_heads_are_warned_of_where_nothing_else_says_which_axis_is_time() -> None:
    swapped = {"q": torch.randn(2, 4, 8, K), "k": unit(2, 4, 8, K), "v": torch.randn(2, 4, 8, V)}
    with pytest.warns(UserWarning, match="fewer tokens than heads; transpose"):
        scan(**swapped, transition=Identity())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scan(**swapped, transition=ScalarGate(-torch.rand(2, 4, 8)))
        scan(**{name: x[:, :1] for name, x in swapped.items()}, transition=Identity())
