"""The table of recurrences and the operands they are timed on."""

import pytest
import torch

from statemix import scan
from statemix.benchmarks.ops import OPS, SHAPES, Sizes, find_ops, names_of, random_operands
from statemix.harness.recurrences import RECURRENCES
from statemix.transitions.modules.registry import transition_names

SIZES = Sizes(2, 70, 2, 4, 24, 40)


NOT_OF_RECIPES = ("kda_product", "gdn2", "rwkv7", "comba")


def test_names_are_those_of_recipes_and_what_differs() -> None:
    bare = {name.removesuffix("_blocks").removesuffix("_projected") for name in OPS}
    assert bare <= {*transition_names(), *NOT_OF_RECIPES}


def test_every_combination_of_gate_direction_count_and_blocks_has_a_row() -> None:
    found = {
        (
            "scalar_decay" in op.uses,
            "channel_decay" in op.uses,
            "direction" in op.uses,
            op.count,
            op.blocks,
        )
        for op in OPS.values()
        if op.max_beta == 2
    }
    assert len(found) == 3 * 2 * 2 * 2
    assert set(names_of("all", timed_only=False)) == set(OPS)
    assert names_of("additive") == ["linear_attention", "retnet", "mamba2", "gla"]
    assert {"deltanet", "gated_deltaproduct", "kda_blocks", "comba"} < set(names_of("delta")) < set(OPS)


@pytest.mark.parametrize(
    "name", ["deltanet", "gated_deltanet_projected_blocks", "kda_product", "gdn2", "rwkv7", "comba"]
)
def test_a_row_is_its_definition(name: str) -> None:
    op = OPS[name]
    x = random_operands(op, Sizes(2, 40, 2, 4, 24, 20), dtype=torch.float64, device=torch.device("cpu"))
    transition, write = op.build(x)
    by_definition, by_chunks = (scan(x.q, x.k, x.v, transition, write=write, form=f) for f in ("recurrent", "chunk"))
    torch.testing.assert_close(by_chunks.output, by_definition.output, rtol=1e-12, atol=1e-12)


def test_steps_and_blocks_have_their_axes() -> None:
    device = torch.device("cpu")
    x = random_operands(OPS["gated_deltaproduct_blocks"], SIZES, dtype=torch.float32, device=device)
    assert x.k.shape == x.direction.shape == (2, 70, 2, 2, 24) and x.v.shape == (2, 70, 2, 4, 40)
    assert x.beta.shape == (2, 70, 2, 4, 2) and x.scalar_decay.shape == (2, 70, 4, 2)
    assert x.like_output.shape == (2, 70, 4, 40)
    for vectors in (x.q, x.k, x.direction):
        assert torch.allclose(vectors.unflatten(-1, (2, -1)).norm(dim=-1), torch.ones(()), atol=1e-6)
    eight = OPS["kda_blocks"].in_blocks(8)
    assert random_operands(eight, SIZES, dtype=torch.float32, device=device).beta.shape[-1] == 8
    assert "8 blocks" in eight.label
    with pytest.raises(ValueError, match="key_dim: expected a multiple of the 7 blocks, got 24"):
        random_operands(eight.in_blocks(7), SIZES, dtype=torch.float32, device=device)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="op: expected one of linear_attention, retnet, .*, got 'glaa'"):
        find_ops(["gla", "glaa"])


@pytest.mark.parametrize("op", RECURRENCES.values(), ids=lambda op: op.name)
def test_a_row_uses_the_operands_it_names_and_no_other(op: object) -> None:
    assert isinstance(op, type(OPS["gla"]))
    x = random_operands(op, SIZES, dtype=torch.float64, device=torch.device("cpu")).map(lambda x: x.requires_grad_())
    transition, write = op.build(x)
    scan(x.q, x.k, x.v, transition, write=write).output.sum().backward()
    assert {name for name, tensor in x.named() if tensor.grad is not None} == op.inputs(x).keys()


def test_operands_have_the_ranges_that_published_timings_had() -> None:
    x = random_operands(OPS["gla"], Sizes(2, 400, 4, 8, 32, 16), dtype=torch.bfloat16, device=torch.device("cpu"))
    for vectors in (x.q, x.k):
        assert vectors.float().norm(dim=-1).sub(1).abs().max() < 1e-2  # rounding to bfloat16
    assert x.q.dtype == x.beta.dtype == torch.bfloat16 and x.scalar_decay.dtype == torch.float32
    assert 0 <= x.beta.min() and x.beta.max() <= 1
    for decay in (x.scalar_decay, x.channel_decay):
        assert decay.max() < 0 and -0.1 < decay.mean() < -0.04
    assert torch.allclose(x.fixed_decay[:2].exp(), torch.tensor([1 - 2**-5, 1 - 2**-6]))


def test_a_seed_decides_the_operands() -> None:
    one, two, other = (
        random_operands(OPS["gla"], SIZES, dtype=torch.float32, device=torch.device("cpu"), seed=s) for s in (0, 0, 1)
    )
    assert torch.equal(one.v, two.v) and not torch.equal(one.v, other.v)


def test_sizes_are_said_briefly() -> None:
    assert str(SHAPES[0]) == "B8 T2048 H16 D128" and str(SIZES) == "B2 T70 H2 HV4 K24 V40"
