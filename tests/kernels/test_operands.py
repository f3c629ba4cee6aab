"""The operands that every implementation takes say what the normal form and the writes say."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from statemix.kernels import NormalForm, ScanOperands, chunk_kernels, chunk_scan, scan_operands
from statemix.kernels.normal_form import repeat_to, with_last_axis, with_steps
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
    "nothing": lambda draw, k: Identity(),
    "decays_fixed": lambda draw, k: fixed(),
    "decays_scalar": lambda draw, k: ScalarGate(draw.decay(HV)),
    "decays_scalar_for_all_rows": lambda draw, k: Free(NormalForm(draw.decay(HV)[:1])),
    "decays_diagonal": lambda draw, k: DiagonalGate(draw.decay(HV, K)),
    "decays_fixed_in_blocks": lambda draw, k: BlockDiagonal(fixed(), BLOCKS),
    "decays_fixed_per_block": lambda draw, k: BlockDiagonal(FixedDecay(leaf(-torch.rand(HV, BLOCKS))), BLOCKS),
    "decays_scalar_in_blocks": lambda draw, k: BlockDiagonal(ScalarGate(draw.decay(HV)), BLOCKS),
    "decays_scalar_per_block": lambda draw, k: BlockDiagonal(ScalarGate(draw.decay(HV, BLOCKS)), BLOCKS),
    "decays_diagonal_in_blocks": lambda draw, k: BlockDiagonal(DiagonalGate(draw.decay(HV, K)), BLOCKS),
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


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, transition: Transition, write: Tensor | None, state: Tensor, cu_seqlens: Any
) -> list[Tensor]:
    """The normal form one token after another: decay, delta updates, writes; dense, blocks as a mask of M_t."""
    form = transition.lower().multiplied()
    block = torch.arange(K) // (K // form.blocks)
    inside = (block[:, None] == block).double()
    if write is None:
        write = v.new_ones(*v.shape[:-1], 1)
    k, v, write = with_steps(k), with_steps(v), with_steps(write if write.ndim == v.ndim else write.unsqueeze(-1))
    q, k = q.repeat_interleave(HV // H, dim=2), repeat_to(write, K) * k.repeat_interleave(HV // H, dim=3)
    decay = q.new_zeros(1, 1, HV, 1) if form.log_decay is None else repeat_to(with_last_axis(form.log_decay), K)
    decay = decay.exp().expand(*q.shape[:2], -1, -1)
    pairs: list[tuple[Tensor, Tensor]] = []
    if form.erase is not None:
        heads = (with_steps(x).repeat_interleave(HV // x.shape[-2], dim=3) for x in form.erase)
        pairs = list(zip(*(x.unbind(2) for x in heads), strict=True))
    num_writes, outputs, finals = k.shape[2], [], []
    offsets = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    for n, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        s = state if cu_seqlens is None else state[n : n + 1]
        for t in range(start, end):
            before, s = s, s * decay[:, t, :, None, :]
            for j in range(max(len(pairs), num_writes)):
                if j < len(pairs):
                    a, b = (x[:, t] for x in pairs[j])
                    read = before if j == 0 and form.reads_before_decay else s
                    s = s - read @ (inside * a.unsqueeze(-1) * b.unsqueeze(-2))
                w = j - max(len(pairs) - num_writes, 0)
                if w >= 0:
                    s = s + v[:, t, w].unsqueeze(-1) * k[:, t, w].unsqueeze(-2)
            outputs.append(0.3 * (s @ q[:, t].unsqueeze(-1)).squeeze(-1))
        finals.append(s)
    outputs += [torch.zeros_like(outputs[0])] * (q.shape[1] - offsets[-1])
    return [torch.stack(outputs, dim=1), torch.cat(finals)]


def made(
    q: Tensor, k: Tensor, v: Tensor, transition: Transition, write: Tensor | None, state: Any = None, cu: Any = None
) -> ScanOperands:
    return scan_operands(q, k, v, transition.lower(), write=write, initial_state=state, cu_seqlens=cu)


def by_operands(*arguments: Any, run: Any = chunk_kernels) -> list[Tensor]:
    given = made(*arguments)
    lead, tokens = (*given.v.shape[:2], given.num_heads), (*given.q.shape[:2], given.num_heads)
    assert all(x is None or x.shape == lead for x in (given.erase_beta, given.write))
    assert given.log_decay is None or given.log_decay.shape in (tokens, (*tokens, given.q.shape[3]), (HV,))
    assert all(x is None or x.shape[:2] == lead[:2] for x in (given.a, given.b))
    output, final_state = run(given, scale=0.3)
    return [output, given.whole_state(final_state)]


def by_torch(*arguments: Any) -> list[Tensor]:
    return by_operands(*arguments, run=lambda given, scale: chunk_scan(given, scale=scale, chunk_size=16))


@pytest.mark.parametrize("written", ["one", "shared", "per_block"])
@pytest.mark.parametrize(("name", "count"), COUNTED)
def test_operands_give_what_the_normal_form_gives_with_every_gradient(
    name: str, count: tuple[int, ...], written: str
) -> None:
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
    wanted = by_definition(*given)
    upstream = [torch.randn_like(x) for x in wanted]
    grads = torch.autograd.grad(wanted, tensors, upstream, allow_unused=True)
    for run in (by_operands, by_torch):
        got = run(*given)
        got_grads = torch.autograd.grad(got, tensors, upstream, allow_unused=True)
        # float64 sums in another order, over at most T n K terms of size 10: 1e-12 leaves four digits
        for x, y in zip([*wanted, *grads], [*got, *got_grads], strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["scalar_gate", "other_direction", "per_block", "nothing", "decays_scalar", "decays_diagonal"]
)
def test_offsets_of_packed_documents_stay_in_tokens(name: str) -> None:
    draw = Draw((3,), batch=1)
    k, q, v = draw.key(), Draw(batch=1).key(), leaf(torch.randn(1, T, 3, HV, V))
    cu_seqlens, state = torch.tensor([0, 0, 3, T - 1], dtype=torch.int32), leaf(torch.randn(3, HV, V, K))
    given = (q, k, v, CASES[name](draw, k), draw.rate(HV), state, cu_seqlens)
    for run, (i, x) in product((by_operands, by_torch), enumerate(by_definition(*given))):
        y = run(*given)[i]
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)


def test_blocks_share_the_value_that_is_handed_on() -> None:
    draw = Draw(())
    k, q, v = draw.key(), Draw().key(), leaf(torch.randn(2, T, HV, V))
    given = made(q, k, v, BlockDiagonal(draw.rule(k), 2), None)
    assert given.v is v and (given.blocks, given.num_heads) == (2, 2 * HV)


@pytest.mark.parametrize("count", [(), (1,), (3,)])
def test_the_delta_rule_is_handed_on_without_a_copy(count: tuple[int, ...]) -> None:
    draw = Draw(count)
    k, q, v, write = draw.key(), Draw().key(), leaf(torch.randn(2, T, *count, HV, V)), draw.rate(HV)
    for gate in (Identity(), ScalarGate(draw.decay(HV)), DiagonalGate(draw.decay(HV, K))):
        rule, log_decay = draw.rule(k), gate.lower().log_decay
        operands = made(q, k, v, Product(gate, rule), write)
        assert operands.a is None
        pairs = [(q, operands.q), (k, operands.b), (v, operands.v), (rule.beta, operands.erase_beta)]
        for given, handed in [*pairs, (write, operands.write), (log_decay, operands.log_decay)]:
            assert given is handed if given is None or not count else given.data_ptr() == handed.data_ptr()


@pytest.mark.parametrize("count", [(), (1,)])
def test_one_write_of_weight_one_is_handed_on_without_a_copy(count: tuple[int, ...]) -> None:
    q, k, v = Draw().key(), Draw(count).key(), leaf(torch.randn(2, T, *count, HV, V))
    for gate in (fixed(), ScalarGate(Draw().decay(HV)), DiagonalGate(Draw().decay(HV, K))):
        operands = made(q, k, v, gate, None)
        handed = (operands.q, operands.b, operands.v, operands.log_decay)
        assert [x.data_ptr() for x in handed if x is not None] == [x.data_ptr() for x in (q, k, v, gate.log_decay)]


def test_low_precisions_stay_what_they_are_beside_float32_factors() -> None:
    draw = Draw()
    k, q, v = (x.detach().bfloat16() for x in (draw.key(), draw.key(), torch.randn(2, T, HV, V)))
    rule = Householder(k, torch.rand(2, T, HV))
    for transition in (rule, Product(rule, DiagonalGate(-torch.rand(2, T, HV, K)))):
        for form in (transition.lower(), transition.lower().multiplied()):
            operands = scan_operands(q, k, v, form, write=rule.beta)
            assert {x.dtype for x in (operands.q, operands.a, operands.b, operands.v) if x is not None} == {
                torch.bfloat16
            }
            assert operands.write is not None and operands.write.dtype == torch.float32
    for tail in ((HV,), (HV, BLOCKS)):
        operands = scan_operands(q, k, v, NormalForm(blocks=BLOCKS), write=torch.rand(2, T, *tail))
        assert operands.q.dtype == operands.b.dtype == operands.v.dtype == torch.bfloat16


def test_more_writes_than_one_need_as_many_erase_pairs() -> None:
    draw = Draw((3,))
    k, q, v = draw.key(), Draw().key(), leaf(torch.randn(2, T, 3, HV, V))
    with pytest.raises(NotImplementedError, match="2 erase pairs and 3 writes a token have no normal form"):
        made(q, k, v, Draw((2,)).rule(), None)


def test_the_kinds_of_decay_are_those_that_kernels_are_compiled_for() -> None:
    pytest.importorskip("triton")
    from statemix.kernels.triton.primitives.gates import DIAGONAL, FIXED, NO_DECAY, SCALAR

    x = torch.zeros(1, 2, 3, 4)
    decays = {NO_DECAY: None, FIXED: x[0, 0, :, 0], SCALAR: x[..., 0], DIAGONAL: x}
    for kind, log_decay in decays.items():
        operands = ScanOperands(x, None, x, x, None, None, log_decay, None, None, erases=False)
        assert operands.decay.value == kind.value
