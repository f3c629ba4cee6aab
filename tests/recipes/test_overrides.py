"""Overrides and derived values: one value changes, what follows from it follows, the rest stays."""

import math

import pytest

from statemix.recipes import RecipeError, load
from statemix.tasks import ByteText
from statemix.transitions import transition_names


def test_overriding_one_item_of_a_list_leaves_the_others(load_text, refusal) -> None:
    as_list = "stack: (delta window)*2 -> stack: [delta, delta, window, delta, window, window]"
    recipe = load_text(as_list, overrides=["stack.3=window"])
    assert recipe.layer_names == ("delta", "delta", "window", "window", "window", "window")
    for index in ("6", "-1", "x", "1.0", ""):
        message = refusal(as_list, overrides=[f"stack.{index}=window"])
        assert message.startswith(f"override stack.{index}=window: ")
    assert "expected an index from 0 to 5, got 6" in refusal(as_list, overrides=["stack.6=window"])


def test_an_expression_has_no_items_and_replace_is_named(refusal) -> None:
    assert "use replace.1=delta" in refusal(overrides=["stack.1=delta"])


def test_one_layer_of_a_stack_is_replaced_by_its_index(load_text) -> None:
    assert load_text(overrides=["replace.1=delta"]).layer_names == ("delta", "delta", "delta", "window")
    assert load_text(overrides=["replace={0: window, 3: delta}"]).layer_names == ("window", "window", "delta", "delta")


def test_keys_left_at_their_defaults_can_be_set(load_text) -> None:
    recipe = load_text(
        overrides=[
            "training.checkpoint_every=7",
            "training.log_every=3",
            "training.steps=9",
            "training.betas.0=0.8",
            "layers.window.mixer.rotary=false",
            "layers.delta.mlp=null",
            "training.task.folder='a folder'",
        ]
    )
    training = recipe.training
    assert (training.checkpoint_every, training.log_every, training.steps) == (7, 3, 9)
    assert training.betas == (0.8, 0.95)
    assert training.task == ByteText.Config(folder="a folder")
    assert recipe.layers["window"].mixer.rotary is False
    assert recipe.layers["delta"].mlp is None and recipe.layers["window"].mlp is not None


def test_a_value_is_read_as_in_a_file(load_text, refusal) -> None:
    assert load_text(overrides=["training.lr=1e-3"]).training.lr == 1e-3
    assert load_text(overrides=["training.task={type: mqar, num_pairs: 4}"]).training.task.num_pairs == 4
    assert load_text(overrides=[" training.steps = 30 "]).training.steps == 30
    assert load_text(overrides=["name=a=b"]).name == "a=b"
    assert "on is a boolean" in refusal(overrides=["layers.window.mixer.rotary=on"])
    assert "close the bracket" in refusal(overrides=["training.betas=[0.9"])
    assert "expected an integer, got 1000.0; write 1000" in refusal(overrides=["training.steps=1e3"])


def test_a_mapping_is_replaced_by_a_name_and_a_name_is_opened_by_a_path(load_text) -> None:
    mapping = "transition: householder -> transition: {type: householder, count: 2}"
    gla = load_text(mapping, overrides=["layers.delta.mixer.transition=gla"]).layers["delta"].mixer.transition
    assert [factor.type for factor in gla] == ["diagonal_gate"]
    opened = load_text(overrides=["layers.delta.mixer.transition.max_beta=2"]).layers["delta"].mixer.transition
    assert opened[0].max_beta == 2
    kda = ["layers.delta.mixer.transition=kda", "layers.delta.mixer.transition.1.max_beta=2"]
    assert load_text(overrides=kda).layers["delta"].mixer.transition[1].max_beta == 2


def test_later_overrides_win(load_text) -> None:
    assert load_text(overrides=["training.seed=1", "training.seed=2"]).training.seed == 2


def test_an_aliased_section_changes_in_one_place_only(load_text) -> None:
    layers = load_text(overrides=["layers.delta.mlp.width=40"]).layers
    assert (layers["delta"].mlp.width, layers["window"].mlp.width) == (40, 24)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.step=3", "training.step: unknown key; expected one of task, seq_len,"),
        ("training.step=3", "did you mean steps?"),
        ("trainin.steps=3", "trainin: unknown key; expected one of format, name,"),
        ("trainin.steps=3", "did you mean training?"),
        ("layers.delt.mixer.key_dim=3", "layers.delt: unknown key; expected one of delta, window; did you mean delta?"),
        ("layers.delta.mixer.key_dm=3", "layers.delta.mixer.key_dm: unknown key"),
        ("layers.delta.mixer.key_dm=3", "did you mean key_dim?"),
        ("layers.delta.mixr.key_dim=3", "did you mean mixer?"),
        ("layers.delta.mixer.transition=gl", "did you mean gla?"),
        ("layers.delta.mixer.transition.max_bta=2", "did you mean max_beta?"),
        ("steps=3", "did you mean training.steps?"),
        ("training.steps.x=3", "training.steps is 20, which has nothing inside"),
        ("layers.delta.mixer.num_value_heads.x=3", "layers.delta.mixer.num_value_heads is null"),
        ("training.steps", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("training..steps=3", "expected key.path=value"),
        ("training.steps=", "expected a value after '='"),
        ("training.warmup_steps=21", "training.warmup_steps: expected at most steps = 20, got 21"),
        ("layers.delta=null", "layers.delta: expected a mapping, got null"),
        ("model=3", "model: expected a mapping, got 3"),
        ("stack=delta*2 windw", "unknown layer windw at position 9"),
        ("replace.9=delta", "expected an index from 0 to 3 (the stack has 4 layers), got 9"),
    ],
)
def test_a_wrong_override_is_named_with_what_to_do(refusal, override: str, message: str) -> None:
    text = refusal(overrides=["training.seed=1", override])
    assert all(line.startswith((f"override {override}: ", "    ")) for line in text.split("\n"))
    assert message in text


def test_overrides_given_as_one_text_are_refused() -> None:
    with pytest.raises(RecipeError, match="expected a list"):
        load("quickstart", "training.steps=3")


@pytest.mark.parametrize("name", [name for name in transition_names() if name != "block_diagonal"])
def test_every_name_and_alias_goes_into_quickstart(name: str) -> None:
    recipe = load("quickstart", [f"layers.delta.mixer.transition={name}"])
    assert recipe.layers["delta"].mixer.transition == load(recipe.model_dump()).layers["delta"].mixer.transition


DERIVED = "key_dim: 8, -> key_dim: '${model.hidden_size}/${.num_heads}',"


def test_a_derived_value_follows_overrides_and_gives_way_to_one(load_text) -> None:
    def key_dim(*overrides: str) -> int:
        return load_text(DERIVED, overrides=overrides).layers["delta"].mixer.key_dim

    assert key_dim() == 8
    assert key_dim("model.hidden_size=32") == 16
    assert key_dim("layers.delta.mixer.num_heads=4") == 4
    assert key_dim("model.hidden_size=32", "layers.delta.mixer.key_dim=5") == 5


def test_interpolation_reaches_names_mappings_and_derived_values(load_text) -> None:
    recipe = load_text(
        "window: -> half:\n    mixer: {type: attention, num_heads: 2, head_dim: '${layers.delta.mixer.key_dim}//3*2'}\n"
        "    mlp: ${layers.delta.mlp}\n  window:",
        DERIVED,
        "name: small -> name: small-${model.hidden_size}",
        "stack: (delta window)*2 -> stack: delta half window",
        overrides=["model.hidden_size=20", "layers.delta.mlp.width=12"],
    )
    assert recipe.name == "small-20"
    assert recipe.layers["half"].mixer.head_dim == 6
    assert recipe.layers["half"].mlp == recipe.layers["delta"].mlp
    assert recipe.layers["half"].mlp.width == 12


def test_an_override_may_refer_to_other_values(load_text) -> None:
    recipe = load_text(
        overrides=[
            "training.warmup_steps=${training.steps}//8",
            "training.weight_decay=0.1",
            "training.lr=${.weight_decay}*2",
        ]
    )
    assert recipe.training.warmup_steps == 2
    assert math.isclose(recipe.training.lr, 0.2, rel_tol=1e-15)  # one rounding


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${model.hiden_size}", "refers to model.hiden_size, which the recipe does not set"),
        ("${model.hiden_size}", "did you mean hidden_size?"),
        ("${model.hidden_size}/3", "16 / 3 is not a whole number"),
        ("${model.hidden_size}/0", "divided by zero"),
        ("${.key_dim}*2", "refers back to itself"),
        ("${.key_dim}", "refers back to itself"),
        ("${.value_dim}*2", "refers back to itself"),
        ("${model.hidden_size", "close the bracket"),
        ("${model.hidden_size}x", "expected an integer, got '16x'"),
        ("${model.hidden_size}/${name}", "expected an integer, got '16/small'"),
    ],
)
def test_a_wrong_interpolation_is_named_with_its_place(refusal, value: str, message: str) -> None:
    text = refusal(f"key_dim: 8, value_dim: 8 -> key_dim: '{value}', value_dim: '${{.key_dim}}*1'")
    assert text.startswith("small.yaml:5:49: layers.delta.mixer.key_dim: ") and message in text


def test_a_literal_dollar_survives(load_text) -> None:
    recipe = load_text("name: small -> name: '\\${x}'")
    assert recipe.name == "${x}"
    assert load_text(text=recipe.to_yaml()) == recipe
