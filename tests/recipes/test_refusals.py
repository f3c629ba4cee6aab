"""Nothing wrong in a recipe is ignored: each fault names its place, its key path, what was expected and a way out."""

import copy
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from statemix.recipes import RecipeError, load, shipped
from statemix.recipes.errors import MAX_FAULTS
from statemix.recipes.marked_yaml import read_yaml

# The large ones differ from one another and from the small ones in sizes and maps only.
SHIPPED = [pytest.param(name, marks=[pytest.mark.slow] * name.endswith(("-340m", "-1.3b"))) for name in shipped()]


_read = functools.cache(lambda name: read_yaml(shipped()[name].read_text()).data)


def contents(name: str) -> dict[str, Any]:
    return copy.deepcopy(_read(name))


def key_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all keys of mappings, those inside lists too."""
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        if isinstance(value, Mapping):
            yield (*path, key)
        yield from key_paths(inner, (*path, key))


def holder(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        data = data[key]
    return data


def mutated(key: str) -> str:
    middle = len(key) // 2
    return key[:middle] + ("x" if key[middle] != "x" else "q") + key[middle + 1 :]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_wrong_letter_in_any_key_is_named_and_the_right_key_suggested(name: str) -> None:
    for path in key_paths(contents(name)):
        if not isinstance(path[-1], str):
            continue
        data = contents(name)
        parent = holder(data, path)
        parent[mutated(path[-1])] = parent.pop(path[-1])
        with pytest.raises(RecipeError) as caught:
            load(data)
        message = str(caught.value)
        wrong = mutated(path[-1])
        assert wrong in message, path
        if path[:-1] == ("layers",):
            assert f"unknown layer {path[-1]}" in message and f"did you mean {wrong}?" in message, path
        else:
            assert f"did you mean {path[-1]}?" in message or f"rename {wrong} to {path[-1]}" in message, path


@pytest.mark.parametrize("name", SHIPPED)
def test_a_key_one_level_too_far_up_is_named_with_its_right_place(name: str) -> None:
    for path in key_paths(contents(name)):
        data = contents(name)
        above = holder(data, path[:-1]) if len(path) > 1 else None
        if not isinstance(above, dict) or path[-1] in above:
            continue
        above[path[-1]] = holder(data, path).pop(path[-1])
        with pytest.raises(RecipeError) as caught:
            load(data)
        message = str(caught.value)
        moved = ".".join(map(str, (*path[:-2], path[-1])))
        assert moved in message, path
        assert f"did you mean {'.'.join(map(str, path))}?" in message or "too far up, move it here" in message, path


def test_places_are_those_of_the_file(refusal) -> None:
    assert refusal("num_heads -> num_head").startswith(
        "small.yaml:5:26: layers.delta.mixer.num_head: unknown key; expected one of type, num_heads,"
    )
    assert refusal("num_heads: 2 -> num_heads: two") == (
        "small.yaml:5:37: layers.delta.mixer.num_heads: expected an integer, got 'two'"
    )
    assert (
        refusal("hidden_size: 16 -> hidden_size: 0")
        == "small.yaml:2:39: model.hidden_size: expected more than 0, got 0"
    )
    assert refusal(", hidden_size: 16 -> ").startswith("small.yaml:2:1: model.hidden_size: missing key (")
    assert refusal("name: small\n -> ").startswith("small.yaml: name: missing key (")


def test_a_recipe_given_as_a_dict_is_checked_alike() -> None:
    data = contents("quickstart") | {"lr": 1}
    with pytest.raises(RecipeError, match=r"^lr: unknown key; .* did you mean training.lr\?$"):
        load(data)


def test_all_faults_are_listed_and_long_lists_are_cut(refusal) -> None:
    text = refusal("num_heads: 2 -> num_heads: 2.0", "lr: 1e-4 -> lr: fast", "name: small -> name: ''")
    assert [line.split(": ")[1] for line in text.split("\n")] == ["name", "layers.delta.mixer.num_heads", "training.lr"]
    many = refusal("seed: 3 -> " + ", ".join(f"key{i}: 1" for i in range(MAX_FAULTS + 2)))
    assert len(many.split("\n")) == MAX_FAULTS + 1 and many.endswith("... and 2 more")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lr: 1e-4 -> lr: on", "training.lr: on is a boolean"),
        ("name: small -> name: no", "name: no is a boolean"),
        ("width: 24 -> width: 010", "layers.delta.mlp.width: 010 is octal"),
        ("width: 24 -> width: 24.0", "layers.delta.mlp.width: expected an integer, got 24.0; write 24"),
        ("width: 24 -> width: '24'", "layers.delta.mlp.width: expected an integer, got '24'; write 24 without quotes"),
        ("width: 24 -> width: true", "layers.delta.mlp.width: expected an integer, got true"),
        ("num_heads: 2 -> num_heads: true", "layers.delta.mixer.num_heads: expected an integer, got true"),
        ("num_heads: 2 -> num_heads: null", "layers.delta.mixer.num_heads: expected an integer, got null"),
        ("conv_size: 4 -> conv_bias: 1", "layers.delta.mixer.conv_bias: expected true or false, got 1"),
        (
            "window: 4 -> rotary: 'true'",
            "layers.window.mixer.rotary: expected true or false, got 'true'; write true without",
        ),
        ("lr: 1e-4 -> lr: '1e-4'", "training.lr: expected a number, got '1e-4'; write 1e-4 without quotes"),
        ("lr: 1e-4 -> lr: true", "training.lr: expected a number, got true"),
        ("lr: 1e-4 -> lr: .inf", "training.lr: expected a finite number, got inf"),
        ("lr: 1e-4 -> lr: 0", "training.lr: expected more than 0, got 0"),
        ("seed: 3 -> betas: [0.9, 1.0]", "training.betas.1: expected less than 1, got 1.0"),
        ("seed: 3 -> betas: [0.9, true]", "training.betas.1: expected a number, got true"),
        ("seed: 3 -> betas: 0.9", "training.betas: expected a list, got 0.9"),
        ("name: small -> name: 3", "name: expected a text, got 3; quote it: '3'"),
        ("name: small -> format: 2\nname: small", "format: expected 1, got 2"),
        ("name: small -> format: true\nname: small", "format: expected an integer, got true"),
        (
            "transition: householder -> transition: {type: householder, count: true}",
            "transition.count: expected an integer",
        ),
        (
            "transition: householder -> transition: {type: householder, count: 2.0}",
            "transition.count: expected an integer",
        ),
        ("transition: householder -> transition: 3", "layers.delta.mixer.transition"),
        ("stack: (delta window)*2 -> stack: 3", "stack: expected a layer name or an expression"),
        ("stack: (delta window)*2 -> stack: [delta, 3]", "stack.1: expected a layer name or an expression"),
        ("stack: (delta window)*2 -> stack: null", "stack: expected a layer name or an expression"),
        ("stack: (delta window)*2 -> stack: []", "stack: expected at least one layer"),
        (
            "delta window)*2 -> delta windw)*2",
            "stack: unknown layer windw at position 8; expected one of delta, window",
        ),
        ("16} -> 16, num_layers: 6}", "model.num_layers: expected 4, the length of the stack, got 6"),
        ("16} -> 16, num_layers: 3}", "model.num_layers: expected 4, the length of the stack, got 3"),
        (
            "task: text -> task: texts",
            "training.task: expected one of text, mqar, parity, got 'texts'; did you mean text?",
        ),
        (
            "task: text -> task: {type: tex}",
            "training.task.type: expected one of text, mqar, parity, got 'tex'; did you mean text?",
        ),
        (
            "task: text -> task: {type: text, num_pairs: 3}",
            "training.task.num_pairs: unknown key; expected one of type, folder",
        ),
        (
            "task: text -> task: {type: mqar, num_pairs: 5}",
            "training.task.num_pairs: expected at most seq_len / 4 = 4, got 5",
        ),
        ("warmup_steps: 2 -> warmup_steps: 21", "training.warmup_steps: expected at most steps = 20, got 21; lower"),
        ("vocab_size: 256 -> vocab_size: 255", "model.vocab_size: expected 256 or more for task text"),
        (
            "type: state -> type: sate",
            "layers.delta.mixer.type: expected one of attention, state, got 'sate'; did you mean state?",
        ),
        ("type: state, -> ", "layers.delta.mixer.type: missing key; expected one of attention, state; add it"),
        ("type: swiglu -> type: swigl", "layers.delta.mlp.type: expected swiglu, got 'swigl'; did you mean swiglu?"),
        ("layers: -> layers:\n  3: {mixer: {type: attention, num_heads: 2}}", "layers.3: expected a text, got 3"),
        (
            "layers: -> layers:\n  a b: {mixer: {type: attention, num_heads: 2}}",
            "layers.a b: expected a name of letters",
        ),
        (
            "num_heads: 2, window -> num_heads: 3, window",
            "layers.window.mixer.num_heads: expected a divisor of hidden_size",
        ),
        (
            "num_heads: 2, key -> num_heads: 2, num_value_heads: 3, key",
            "layers.delta.mixer.num_value_heads: expected a multiple",
        ),
        ("conv_size: 4 -> key_norm: none", "layers.delta.mixer.key_norm: expected l2"),
        ("householder -> {type: block_diagonal, inner: householder, blocks: 3}", "layers.delta.mixer"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(refusal, change: str, message: str) -> None:
    text = refusal(change)
    assert text.startswith("small.yaml:") and message in text


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        ("{4: delta}", "replace.4: expected an index from 0 to 3 (the stack has 4 layers), got 4"),
        ("{-1: delta}", "replace.-1: expected an index from 0 to 3 (the stack has 4 layers), got -1"),
        ("{2.0: delta}", "replace.2.0: expected an integer, got 2.0; write 2"),
        ("{true: delta}", "replace.True: expected an integer, got true"),
        ("{'2': delta}", "replace.2: expected an integer, got '2'; write 2 without quotes"),
        ("{1: delt}", "replace.1: unknown layer delt; expected one of delta, window; did you mean delta?"),
        ("{1: 2}", "replace.1: expected a text, got 2; quote it: '2'"),
        ("{1: delta, 1: window}", "replace.1: the key appears twice, first on line 11; remove one of them"),
        ("[delta]", "replace: expected a mapping, got a list of 1"),
    ],
)
def test_a_wrong_replacement_is_named_with_file_key_and_value(refusal, replace: str, message: str) -> None:
    text = refusal(f"training: -> replace: {replace}\ntraining:")
    assert text.startswith("small.yaml:11:") and message in text


JUNK = (
    None,
    True,
    0,
    -1,
    2.5,
    math.nan,
    2**70,
    "",
    "x",
    "${x}",
    "${",
    "???",
    [],
    {},
    [[]],
    [None],
    {2.5: 1},
    {None: 1},
)


def test_junk_anywhere_is_refused_or_read_but_never_a_crash() -> None:
    data = contents("deltaproduct")
    for path in [*key_paths(data), ("replace",)]:
        for junk in JUNK:
            wrong = copy.deepcopy(data)
            holder(wrong, path)[path[-1]] = junk
            try:
                recipe = load(wrong)
            except RecipeError as error:
                assert str(error)
            else:
                assert load(read_yaml(recipe.to_yaml()).data) == recipe


def test_options_of_another_kind_are_refused_not_replaced_by_defaults(refusal) -> None:
    assert "kda is a transition" in refusal("type: state -> type: kda")
    assert "layers.delta.mixer.transition.n_householder" in refusal(
        "transition: householder -> transition: {type: scalar_gate, n_householder: 2}"
    )
    assert "layers.delta.mixer.transition" in refusal(
        "transition: householder -> transition: {type: kda, n_householder: 2}"
    )
    assert "layers.delta.mixer.window: unknown key" in refusal("conv_size: 4 -> window: 4")
    assert "layers.window.mixer.conv_size: unknown key" in refusal("window: 4 -> conv_size: 4")


def test_a_fault_inside_a_list_of_factors_is_placed_in_its_item(refusal) -> None:
    text = refusal("transition: householder -> transition: [scalar_gate, {type: householder, cont: 2}]")
    assert text.startswith("small.yaml:5:126: layers.delta.mixer.transition.1.cont: unknown key")
    assert text.endswith("did you mean count?")


def test_a_missing_recipe_names_the_shipped_ones() -> None:
    with pytest.raises(RecipeError, match=r"^quikstart.yaml: no such recipe; .* did you mean quickstart\?$"):
        load("quikstart.yaml")


def test_what_is_not_a_recipe_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xff\xfe")
    for path, message in [
        (tmp_path, "got a folder; name .*recipe.yaml"),
        (tmp_path / "recipe.yaml", "expected a mapping with name, model, layers and stack, got null"),
        (binary, "expected UTF-8 text, got byte 0xff"),
    ]:
        with pytest.raises(RecipeError, match=message):
            load(path)
