"""The table of recurrences and the operands they are timed on."""

import pytest
import torch

from statemix import scan
from statemix.ops import OPS, SHAPES, Sizes, find_ops, random_operands
from statemix.transitions.registry import transition_names

SIZES = Sizes(2, 70, 2, 4, 24, 40)


def test_names_are_those_of_recipes() -> None:
    assert set(OPS) <= set(transition_names())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="op: expected one of linear_attention, retnet, .*, got 'glaa'"):
        find_ops(["gla", "glaa"])


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_a_row_uses_the_operands_it_names_and_no_other(op: object) -> None:
    assert isinstance(op, type(OPS["gla"]))
    x = random_operands(SIZES, dtype=torch.float64, device=torch.device("cpu")).map(lambda x: x.requires_grad_())
    transition, write = op.make(x)
    scan(x.q, x.k, x.v, transition, write=write).output.sum().backward()
    assert {name for name, tensor in x.named() if tensor.grad is not None} == op.inputs(x).keys()


def test_operands_have_the_ranges_that_published_timings_had() -> None:
    x = random_operands(Sizes(2, 400, 4, 8, 32, 16), dtype=torch.bfloat16, device=torch.device("cpu"))
    for vectors in (x.q, x.k):
        assert vectors.float().norm(dim=-1).sub(1).abs().max() < 1e-2  # rounding to bfloat16
    assert x.q.dtype == x.beta.dtype == torch.bfloat16 and x.scalar_decay.dtype == torch.float32
    assert 0 <= x.beta.min() and x.beta.max() <= 1
    for decay in (x.scalar_decay, x.channel_decay):
        assert decay.max() < 0 and -0.1 < decay.mean() < -0.04
    assert torch.allclose(x.fixed_decay[:2].exp(), torch.tensor([1 - 2**-5, 1 - 2**-6]))


def test_a_seed_decides_the_operands() -> None:
    one, two, other = (
        random_operands(SIZES, dtype=torch.float32, device=torch.device("cpu"), seed=s) for s in (0, 0, 1)
    )
    assert torch.equal(one.v, two.v) and not torch.equal(one.v, other.v)


def test_sizes_are_said_briefly() -> None:
    assert str(SHAPES[0]) == "B8 T2048 H16 D128" and str(SIZES) == "B2 T70 H2 HV4 K24 V40"
