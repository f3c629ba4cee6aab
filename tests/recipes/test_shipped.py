"""The shipped recipes: each builds, learns, says where it comes from, and survives being written and read."""

import pytest
import torch

from statemix.mixers import Attention
from statemix.recipes import build, layer_table, load, shipped

# The large ones have tests of their own, test_paper_recipes.py.
SHIPPED = tuple(name for name in shipped() if not name.endswith(("-340m", "-1.3b")))
PER_TRANSITION = {
    "linear-attention": {"identity"},
    "retnet": {"fixed_decay"},
    "mamba2": {"scalar_gate"},
    "gla": {"diagonal_gate"},
    "deltanet": {"householder"},
    "deltaproduct": {"householder"},
    "gated-deltanet": {"scalar_gate", "householder"},
    "kda": {"diagonal_gate", "householder"},
    "block-diagonal-deltanet": {"block_diagonal"},
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_runs_forward_and_backward_and_round_trips(name: str, tmp_path) -> None:
    recipe = load(name)
    written = tmp_path / "recipe.yaml"
    written.write_text(recipe.to_yaml())
    again = load(written)
    assert again == recipe and again.to_yaml() == recipe.to_yaml()
    assert written.read_text().startswith("format: 1\n")

    models = []
    for source in (recipe, again):
        torch.manual_seed(0)
        models.append(build(source))
    model, rebuilt = models
    assert all(torch.equal(value, rebuilt.state_dict()[key]) for key, value in model.state_dict().items())
    assert model.recipe is recipe

    tokens = torch.randint(recipe.model.vocab_size, (2, 7), generator=torch.Generator().manual_seed(0))
    logits, _ = model(tokens)
    assert torch.equal(logits, rebuilt(tokens)[0])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_is_short_sourced_named_after_its_file_and_small(name: str) -> None:
    recipe = load(name)
    assert len(shipped()[name].read_text().splitlines()) < 40
    assert recipe.name == name
    assert recipe.source.startswith("arXiv:") and "section" in recipe.source
    table = layer_table(recipe)
    assert 8e5 < table.parameters < 1.3e6
    assert not table.unused


def test_there_is_a_recipe_for_each_transition() -> None:
    for name, types in PER_TRANSITION.items():
        (layer,) = load(name).layers.values()
        assert {factor.type for factor in layer.mixer.transition} == types
    assert {load(name).training for name in PER_TRANSITION}.__len__() == 1


def test_quickstart_and_its_twin_differ_in_their_mixers_only() -> None:
    hybrid, twin = load("quickstart"), load("quickstart-attention")
    assert hybrid.training == twin.training and hybrid.model == twin.model
    assert len(hybrid.layer_names) == len(twin.layer_names)
    assert {layer.mlp for layer in hybrid.layer_configs} == {layer.mlp for layer in twin.layer_configs}
    assert {layer.mixer.type for layer in hybrid.layer_configs} == {"state", "attention"}
    assert all(layer.mixer.type == "attention" and layer.mixer.window is None for layer in twin.layer_configs)
    sizes = [layer_table(recipe).parameters for recipe in (hybrid, twin)]
    assert max(sizes) < 1.1 * min(sizes)


def test_the_hybrids_have_attention_where_the_paper_puts_it() -> None:
    window = build(load("deltanet-window"))
    assert [isinstance(block.mixer, Attention) for block in window.blocks] == [False, True] * 4
    globally = build(load("deltanet-global"))
    num_layers = len(globally.blocks)
    counted_from_one = [i for i, block in enumerate(globally.blocks, 1) if isinstance(block.mixer, Attention)]
    assert counted_from_one == [2, num_layers // 2 + 1]


@pytest.mark.parametrize("steps", [1, 2, 20, 400])
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_takes_any_number_of_steps(name: str, steps: int) -> None:
    assert load(name, [f"training.steps={steps}"]).training.warmup_steps == steps // 20
