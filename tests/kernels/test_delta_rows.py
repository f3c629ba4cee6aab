"""The rows that the kernels take say the same as the micro-steps that the torch chunk form takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from statemix.kernels import NormalForm, chunk_scan, delta_rows, delta_scan, merge_write
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

T, H, HV, K, V, BLOCKS = 7, 2, 4, 6, 5, 2


class Free(Transition):
    """Of a normal form that is given."""

    form: NormalForm

    def apply(self, state: Tensor) -> Tensor:
        raise NotImplementedError

    def lower(self) -> NormalForm:
        return self.form


@dataclass(frozen=True)
class Draw:
    """Leaves in float64; ``count`` is () or (n,)."""

    count: tuple[int, ...] = ()
    batch: int = 2

    def key(self, heads: int = H) -> Tensor:
        return leaf(F.normalize(torch.randn(self.batch, T, *self.count, heads, K), dim=-1))

    def rate(self, *tail: int) -> Tensor:
        return leaf(torch.rand(self.batch, T, *self.count, *tail))

    def decay(self, *tail: int) -> Tensor:
        return leaf(-2 * torch.rand(self.batch, T, *tail))

    def rule(self, key: Tensor | None = None) -> Householder:
        return Householder(self.key() if key is None else key, self.rate(HV))


def leaf(x: Tensor) -> Tensor:
    return x.double().requires_grad_()


def fixed() -> FixedDecay:
    return FixedDecay(leaf(-torch.rand(HV)))


# From the write key k, a transition.
CASES: dict[str, Callable[[Draw, Tensor], Transition]] = {
    "delta_rule": lambda draw, k: draw.rule(k),
    "fixed_decay": lambda draw, k: Product(fixed(), draw.rule(k)),
    "scalar_gate": lambda draw, k: Product(ScalarGate(draw.decay(HV)), draw.rule(k)),
    "diagonal_gate": lambda draw, k: Product(DiagonalGate(draw.decay(HV, K)), draw.rule(k)),
    "other_direction": lambda draw, k: Product(ScalarGate(draw.decay(HV)), draw.rule()),
    "free_read": lambda draw, k: Free(NormalForm(draw.decay(HV, K), (draw.key(HV), k), reads_before_decay=True)),
    "free": lambda draw, k: Free(NormalForm(draw.decay(HV)[:1], (draw.key(HV), draw.key(HV)), reads_before_decay=True)),
    "tied_without_rate": lambda draw, k: Free(NormalForm(None, (direction := draw.key(HV), direction))),
    "shared_by_blocks": lambda draw, k: BlockDiagonal(Product(fixed(), draw.rule(k)), BLOCKS),
    "per_block": lambda draw, k: BlockDiagonal(
        Product(ScalarGate(draw.decay(HV, BLOCKS)), Householder(k, draw.rate(HV, BLOCKS))), BLOCKS
    ),
    "diagonal_in_blocks": lambda draw, k: BlockDiagonal(Product(DiagonalGate(draw.decay(HV, K)), draw.rule(k)), BLOCKS),
    "other_direction_in_blocks": lambda draw, k: BlockDiagonal(draw.rule(), BLOCKS),
    "one_block": lambda draw, k: BlockDiagonal(Product(fixed(), draw.rule(k)), 1),
}
UNCOUNTED: dict[str, Callable[[Draw, Tensor], Transition]] = {
    "two_erasures_one_write": lambda draw, k: Draw((2,), draw.batch).rule(),
    "gate_after": lambda draw, k: Product(draw.rule(k), DiagonalGate(draw.decay(HV, K))),
    "two_products": lambda draw, k: Product(draw.rule(), draw.rule(k)),
    "product_with_a_free_one": lambda draw, k: Product(draw.rule(), Free(NormalForm(None, (draw.key(HV), k)))),
}
COUNTED = [(name, count) for name in CASES for count in ((), (1,), (3,))] + [(name, ()) for name in UNCOUNTED]


def leaves(transition: Transition) -> list[Tensor]:
    if isinstance(transition, Free):
        return [x for x in (transition.form.log_decay, *(transition.form.erase or ())) if x is not None]
    fields = (getattr(transition, name) for name, _ in transition.layout())
    return [x for y in fields for x in (leaves(y) if isinstance(y, Transition) else [y]) if isinstance(x, Tensor)]


def by_micro_steps(
    q: Tensor, k: Tensor, v: Tensor, transition: Transition, write: Tensor | None, state: Tensor, cu_seqlens: Any
) -> list[Tensor]:
    steps = merge_write(transition.lower(), k, v, write)
    return list(chunk_scan(q, steps, state, scale=0.3, chunk_size=16, cu_seqlens=cu_seqlens))


def by_rows(
    q: Tensor, k: Tensor, v: Tensor, transition: Transition, write: Tensor | None, state: Tensor, cu_seqlens: Any
) -> list[Tensor]:
    form = transition.lower_factored()
    given = delta_rows(q, k, v, form, write=write, initial_state=state, cu_seqlens=cu_seqlens)
    lead, tokens = (*given.v.shape[:2], given.num_heads), (*given.q.shape[:2], given.num_heads)
    assert all(x is None or x.shape == lead for x in (given.rate, given.weight))
    assert given.log_decay is None or given.log_decay.shape in (tokens, (*tokens, given.q.shape[3]))
    assert all(x is None or x.shape[:2] == lead[:2] for x in (given.a, given.b))
    output, final_state = delta_scan(given, scale=0.3)
    return [output, given.whole_state(final_state)]


@pytest.mark.parametrize("written", ["one", "shared", "per_block"])
@pytest.mark.parametrize(("name", "count"), COUNTED)
def test_rows_give_what_micro_steps_give_with_every_gradient(name: str, count: tuple[int, ...], written: str) -> None:
    draw = Draw(count)
    k = draw.key()
    transition = (CASES | UNCOUNTED)[name](draw, k)
    blocks = transition.num_blocks
    if written == "per_block" and blocks == 1:
        return
    write = {"one": None, "shared": draw.rate(HV), "per_block": draw.rate(HV, blocks)}[written]
    q, v, state = Draw().key(), leaf(torch.randn(2, T, *count, HV, V)), leaf(torch.randn(2, HV, V, K))
    given = (q, k, v, transition, write, state, None)
    tensors = [x for x in (q, k, v, write, state, *leaves(transition)) if x is not None]
    wanted, got = by_micro_steps(*given), by_rows(*given)
    upstream = [torch.randn_like(x) for x in wanted]
    grads = [torch.autograd.grad(results, tensors, upstream, allow_unused=True) for results in (wanted, got)]
    # float64 sums in another order, over at most T n K terms of size 10: 1e-12 leaves four digits
    for x, y in zip([*wanted, *grads[0]], [*got, *grads[1]], strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["scalar_gate", "other_direction", "per_block"])
def test_offsets_of_packed_documents_stay_in_tokens(name: str) -> None:
    draw = Draw((3,), batch=1)
    k, q, v = draw.key(), Draw(batch=1).key(), leaf(torch.randn(1, T, 3, HV, V))
    cu_seqlens, state = torch.tensor([0, 0, 3, T - 1], dtype=torch.int32), leaf(torch.randn(3, HV, V, K))
    given = (q, k, v, CASES[name](draw, k), draw.rate(HV), state, cu_seqlens)
    for x, y in zip(by_micro_steps(*given), by_rows(*given), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


def test_blocks_share_the_value_that_is_handed_on() -> None:
    draw = Draw(())
    k, q, v = draw.key(), Draw().key(), leaf(torch.randn(2, T, HV, V))
    form = BlockDiagonal(draw.rule(k), 2).lower_factored()
    given = delta_rows(q, k, v, form, write=None, initial_state=None, cu_seqlens=None)
    assert given.v is v and (given.blocks, given.num_heads) == (2, 2 * HV)


@pytest.mark.parametrize("count", [(), (1,), (3,)])
def test_the_delta_rule_is_handed_on_without_a_copy(count: tuple[int, ...]) -> None:
    draw = Draw(count)
    k, q, v, write = draw.key(), Draw().key(), leaf(torch.randn(2, T, *count, HV, V)), draw.rate(HV)
    for gate in (Identity(), ScalarGate(draw.decay(HV)), DiagonalGate(draw.decay(HV, K))):
        rule = draw.rule(k)
        form = Product(gate, rule).lower_factored()
        rows = delta_rows(q, k, v, form, write=write, initial_state=None, cu_seqlens=None)
        assert rows.a is None
        pairs = [(q, rows.q), (k, rows.b), (v, rows.v), (rule.beta, rows.rate), (write, rows.weight)]
        for given, handed in [*pairs, (form.log_decay, rows.log_decay)]:
            assert given is handed if given is None or not count else given.data_ptr() == handed.data_ptr()


def test_low_precisions_stay_what_they_are_beside_float32_rates() -> None:
    draw = Draw()
    k, q, v = (x.detach().bfloat16() for x in (draw.key(), draw.key(), torch.randn(2, T, HV, V)))
    rule = Householder(k, torch.rand(2, T, HV))
    for transition in (rule, Product(rule, DiagonalGate(-torch.rand(2, T, HV, K)))):
        for form in (transition.lower(), transition.lower_factored()):
            rows = delta_rows(q, k, v, form, write=rule.beta, initial_state=None, cu_seqlens=None)
            assert {x.dtype for x in (rows.q, rows.a, rows.b, rows.v) if x is not None} == {torch.bfloat16}
            assert rows.weight is not None and rows.weight.dtype == torch.float32


def test_lowering_with_a_rate_is_lowering() -> None:
    for name, make in (CASES | UNCOUNTED).items():
        draw = Draw()
        transition = make(draw, draw.key())
        plain, factored = transition.lower(), transition.lower_factored().multiplied()
        assert plain.rate is None
        assert (plain.blocks, plain.reads_before_decay) == (factored.blocks, factored.reads_before_decay), name
        pairs = [(plain.log_decay, factored.log_decay), *zip(plain.erase or (), factored.erase or (), strict=True)]
        assert all(x is y is None or torch.equal(x, y) for x, y in pairs), name  # type: ignore[arg-type]


def test_more_writes_than_one_need_as_many_erasures() -> None:
    draw = Draw((3,))
    k, q, v = draw.key(), Draw().key(), leaf(torch.randn(2, T, 3, HV, V))
    form = Draw((2,)).rule().lower_factored()
    for refuse in (
        lambda: delta_rows(q, k, v, form, write=None, initial_state=None, cu_seqlens=None),
        lambda: merge_write(form, k, v, None),
    ):
        with pytest.raises(NotImplementedError, match="2 erasures and 3 writes a token have no normal form"):
            refuse()
