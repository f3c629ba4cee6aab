"""The recipe as a value: what it builds, what it writes, and that every key of it counts."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from statemix.blocks import SwiGLU
from statemix.mixers import Attention, StateMixer
from statemix.recipes import Recipe, RecipeError, build, layer_table, load, render


def test_each_layer_is_built_from_its_own_section(load_text) -> None:
    recipe = load_text("mlp: *mlp -> mlp: {type: swiglu, width: 56}", overrides=["replace.3=delta"])
    model = build(recipe)
    assert recipe.layer_names == ("delta", "window", "delta", "delta")
    assert model.layer_configs == recipe.layer_configs
    kinds = {"delta": StateMixer, "window": Attention}
    widths = {"delta": 24, "window": 56}
    for name, block in zip(recipe.layer_names, model.blocks, strict=True):
        assert type(block.mixer) is kinds[name] and type(block.mlp) is SwiGLU
        assert block.mlp.gate.out_features == widths[name]
    assert model.blocks[0].mixer.key_dim == 8 and model.blocks[1].mixer.window == 4


@pytest.mark.parametrize("stack", [["delta", "delta", "window", "delta", "window", "window", "delta"], ["delta"] * 5])
def test_an_explicit_list_is_kept_entry_by_entry(load_text, stack: list[str]) -> None:
    recipe = load_text(f"stack: (delta window)*2 -> stack: {stack}")
    again = load_text(text=recipe.to_yaml())
    assert again == recipe and again.layer_names == tuple(stack)
    kinds = [type(block.mixer) for block in build(again).blocks]
    assert kinds == [Attention if name == "window" else StateMixer for name in stack]


def test_a_repeated_group_makes_layers_of_their_own(load_text) -> None:
    recipe = load_text("(delta window)*2 -> (delta*2 window)*3")
    model = build(recipe)
    assert len(model.blocks) == 9 and len({id(p) for block in model.blocks for p in block.parameters()}) == sum(
        len(list(block.parameters())) for block in model.blocks
    )
    assert [row.index for row in layer_table(recipe).rows] == list(range(9))


def test_num_layers_may_be_given_when_it_is_right(load_text) -> None:
    assert load_text("16} -> 16, num_layers: 4}").model.num_layers == 4


def test_training_may_be_left_out_and_a_tuple_of_betas_is_written_as_a_list() -> None:
    layers = {"a": {"mixer": {"type": "attention", "num_heads": 2}}}
    recipe = load({"name": "x", "model": {"vocab_size": 256, "hidden_size": 8}, "layers": layers, "stack": "a"})
    assert "betas: [0.9, 0.95]" in recipe.to_yaml()


def test_a_dict_is_not_changed_by_loading_it() -> None:
    data: dict[str, Any] = load("quickstart").model_dump()
    before = load("quickstart").model_dump()
    changed = load(data, ["training.betas.0=0.5", "replace.0=window", "layers.delta.mixer.transition.0.max_beta=2"])
    assert data == before
    assert changed.training.betas[0] == 0.5 and changed.layers["delta"].mixer.transition[0].max_beta == 2


def test_a_recipe_cannot_be_changed(load_text) -> None:
    recipe = load_text()
    with pytest.raises(ValidationError):
        recipe.name = "other"  # type: ignore[misc]


def test_weights_follow_the_global_seed(load_text) -> None:
    recipe = load_text()
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        weights.append(build(recipe).embedding.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


CHANGES = {
    "format": None,  # one value only
    "name": "other",
    "source": "other",
    "plugins": None,  # lets layers name more transitions, changes nothing
    "model.vocab_size": 257,
    "model.hidden_size": 20,
    "model.tie_embeddings": True,
    "model.norm": None,  # one value only
    "model.norm_eps": 1e-3,
    "model.init_std": 0.5,
    "model.num_layers": None,  # checks the stack, changes nothing
    "layers.delta.mixer.type": None,  # the other options would be those of another type
    "layers.delta.mixer.num_heads": 1,
    "layers.delta.mixer.num_value_heads": 4,
    "layers.delta.mixer.key_dim": 6,
    "layers.delta.mixer.value_dim": 6,
    "layers.delta.mixer.transition": "identity",
    "layers.delta.mixer.conv_size": 3,
    "layers.delta.mixer.conv_bias": True,
    "layers.delta.mixer.feature_map": "identity",
    "layers.delta.mixer.value_map": "silu",
    "layers.delta.mixer.key_norm": "none",
    "layers.delta.mixer.rotary": True,
    "layers.delta.mixer.is_normalized": True,
    "layers.delta.mixer.has_skip": True,
    "layers.delta.mixer.output_norm": "none",
    "layers.delta.mixer.output_gate": "silu",
    "layers.delta.mixer.chunk_size": 16,
    "layers.delta.mixer.recompute": True,
    "layers.delta.mlp.type": None,  # one value only
    "layers.delta.mlp.ratio": None,  # width is given
    "layers.delta.mlp.width": 8,
    "layers.window.mixer.type": None,
    "layers.window.mixer.num_heads": 4,
    "layers.window.mixer.num_kv_heads": 1,
    "layers.window.mixer.head_dim": 4,
    "layers.window.mixer.window": None,
    "layers.window.mixer.rotary": False,
    "layers.window.mixer.rotary_base": 2.0,
    "layers.window.mixer.qk_norm": True,
    "layers.window.mlp.type": None,
    "layers.window.mlp.ratio": None,
    "layers.window.mlp.width": 8,
    "stack": "window delta*3",
    "replace": {0: "window"},
}


def _flat(value: Any, path: str) -> list[str]:
    is_section = isinstance(value, dict) and path not in ("replace", "training")
    return [leaf for key in value for leaf in _flat(value[key], f"{path}.{key}".lstrip("."))] if is_section else [path]


def _behaviour(recipe: Recipe) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = build(recipe)
    tokens = torch.arange(1, 13)[None]
    sizes = [(key, tuple(value.shape)) for key, value in model.state_dict().items()]
    ways = [[getattr(block.mixer, name, None) for name in ("chunk_size", "recompute")] for block in model.blocks]
    return sizes, ways, model(tokens)[0].double().sum().item()


def test_every_key_of_a_model_changes_what_is_built(load_text) -> None:
    # A plain decay and features without signs: every option of the mixer may be chosen.
    recipe = load_text("transition: householder -> transition: retnet, feature_map: relu")
    written = recipe.model_dump()
    assert sorted(_flat(written, "")) == sorted([*CHANGES, "training"])
    before = _behaviour(recipe)
    for path, value in CHANGES.items():
        if value is None and path != "layers.window.mixer.window":
            continue
        data = recipe.model_dump()
        *parents, last = path.split(".")
        section = data
        for key in parents:
            section = section[key]
        section[last] = value
        changed = load(data)
        assert changed != recipe and changed.to_yaml() != recipe.to_yaml()
        assert path in ("name", "source") or _behaviour(changed) != before, path


def test_the_layer_table_counts_what_is_built_and_carried(load_text) -> None:
    recipe = load_text("16} -> 16, tie_embeddings: true}")
    table = layer_table(recipe, seq_len=3)
    model = build(recipe)
    assert table.parameters == sum(p.numel() for p in model.parameters())
    assert table.outer_parameters == 256 * 16 + 16
    _, state = model(torch.zeros(1, 3, dtype=torch.int64))
    sizes = [sum(part.nbytes for part in vars(layer).values() if part.is_floating_point()) for layer in state.layers]
    lengths = [
        sum(part.nbytes for part in vars(layer).values() if not part.is_floating_point()) for layer in state.layers
    ]
    assert [row.state_bytes for row in table.rows] in (sizes, [s + n for s, n in zip(sizes, lengths, strict=True)])
    assert table.state_bytes == sum(row.state_bytes for row in table.rows)
    assert [row.mixer for row in table.rows] == ["state", "attention"] * 2
    with pytest.raises(ValueError, match="seq_len: expected 1 or more"):
        layer_table(recipe, seq_len=0)


def test_the_rendered_table_is_ascii_and_names_every_layer_and_what_is_unused(load_text) -> None:
    text = render(layer_table(load_text("(delta window)*2 -> delta*3")))
    assert text.isascii() and text.count("I - beta_t k_t k_t^T") == 3
    assert "not used by the stack: window" in text
    assert f"{layer_table(load_text()).parameters:,}" in render(layer_table(load_text()))


def test_recipe_errors_are_value_errors() -> None:
    assert issubclass(RecipeError, ValueError)
