"""The YAML reader: values of YAML 1.2, places of every key, and refusals that say where and what to do."""

import math

import pytest

from statemix.recipes.marked_yaml import Mark, YamlError, read_yaml
from statemix.recipes.yaml_text import to_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e4", 1e4),
        ("-1.5E+2", -150.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("0x1f", 31),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'on'", "on"),
        ('"010"', "010"),
        ("!!str 010", "010"),
        ("arXiv:2406.06484", "arXiv:2406.06484"),
        ("1.2.3", "1.2.3"),
        ("(delta window)*2", "(delta window)*2"),
        ("${model.hidden_size}", "${model.hidden_size}"),
        (".inf", math.inf),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    read = read_yaml(f"key: {text}").data["key"]
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "way_out"),
    [(word, "write true or false") for word in "y Y yes Yes YES n N no No NO on On ON off Off OFF".split()]
    + [(number, "drop the leading zero") for number in ("010", "08", "-007", "00")]
    + [(number, "leave out the underscores") for number in ("1_000", "1_0.5")]
    + [(number, "write it in decimal") for number in ("0b11", "0o17", "0x1_f")]
    + [("1:30", "base 60"), ("190:20:30.15", "base 60"), ("2024-01-31", "a date"), ("2024-01-31 10:00:00", "a date")],
)
def test_what_yaml_1_1_reads_otherwise_is_refused_by_name_and_place(text: str, way_out: str) -> None:
    with pytest.raises(YamlError) as caught:
        read_yaml(f"a:\n  gate: {text}\n")
    message = str(caught.value)
    assert caught.value.mark == Mark(2, 9)
    assert message.startswith(f"a.gate: {text} is ")
    assert way_out in message and f"quote it: '{text}'" in message
    assert read_yaml(f"gate: '{text}'").data == {"gate": text}


def test_a_key_that_is_a_boolean_elsewhere_is_refused() -> None:
    with pytest.raises(YamlError, match="n is a boolean"):
        read_yaml("n: 1")


def test_every_key_and_item_has_its_place() -> None:
    document = read_yaml("a:\n  b: [x,\n      {c: 1}]\n")
    places = {path: (place.key, place.value) for path, place in document.places.items()}
    assert places == {
        ("a",): (Mark(1, 1), Mark(2, 3)),
        ("a", "b"): (Mark(2, 3), Mark(2, 6)),
        ("a", "b", 0): (Mark(2, 7), Mark(2, 7)),
        ("a", "b", 1): (Mark(3, 7), Mark(3, 7)),
        ("a", "b", 1, "c"): (Mark(3, 8), Mark(3, 11)),
    }


def test_an_alias_is_a_value_of_its_own_and_merges_keep_the_order_of_precedence() -> None:
    data = read_yaml(
        "a: &a {x: 1, z: [1]}\nb: &b {x: 2, w: 3}\nc: *a\nd: {x: 0, <<: [*a, *b]}\ne: {<<: *b, w: 4}\n"
    ).data
    assert data["c"] == data["a"] and data["c"] is not data["a"] and data["c"]["z"] is not data["a"]["z"]
    assert data["d"] == {"x": 0, "z": [1], "w": 3}
    assert data["e"] == {"x": 2, "w": 4}


@pytest.mark.parametrize(
    ("text", "mark", "message"),
    [
        ("a: 1\nb:\n\tc: 2\n", Mark(3, 1), "indent with spaces, not tabs"),
        ("a: b: c", Mark(1, 5), "one 'key: value' a line"),
        ("a: [1, 2\n", Mark(2, 1), "close the bracket"),
        ("a: {b: 1\nc: 2\n", Mark(2, 2), "close the bracket"),
        ("a: 1\n   b: 2\n", Mark(2, 5), "one 'key: value' a line"),
        ("a: 'x\n", Mark(2, 1), "end of stream"),
        ("a: *b\n", Mark(1, 4), "define it before its use"),
        ("a: @x\n", Mark(1, 4), "quote the text"),
        ("a: 1\n---\nb: 1\n", Mark(2, 1), "one document"),
        ("a: \x07\n", Mark(1, 4), "U+0007 is not allowed"),
        ("a: 1\nb: {c: 2, c: 3}\n", Mark(2, 11), "b.c: the key appears twice, first on line 2"),
        ("a: {1: x, true: y}\n", Mark(1, 11), "a.true: the key appears twice"),
        ("a: !!python/object:os.system x\n", Mark(1, 4), "tags have no meaning"),
        ("a: !thing {b: 1}\n", Mark(1, 4), "tags have no meaning"),
        ("a: &a [*a]\n", Mark(1, 4), "contains itself"),
        ("a: &a {<<: *a}\n", Mark(1, 4), "merges a mapping into itself"),
        ("a: {<<: 3}\n", Mark(1, 9), "expected a mapping or a list of mappings"),
        ("? [a]\n: 1\n", Mark(1, 3), "a key is a name or a number"),
        ("a: {~: 1}\n", Mark(1, 5), "an empty key"),
    ],
)
def test_a_broken_text_is_refused_with_its_place_and_line(text: str, mark: Mark, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        read_yaml(text)
    assert message in str(caught.value)
    assert caught.value.mark == mark


def test_the_offending_line_is_shown_with_a_caret() -> None:
    with pytest.raises(YamlError) as caught:
        read_yaml("a: 1\nb: c: d\n")
    assert str(caught.value).endswith("\n    b: c: d\n        ^")


def test_aliases_of_aliases_do_not_fill_the_memory() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(YamlError, match="aliases of aliases multiply"):
        read_yaml("\n".join(lines))


@pytest.mark.parametrize(
    "text",
    [
        "on",
        "010",
        "1e-4",
        "1:30",
        "null",
        "",
        "true",
        "a: b",
        "#x",
        "- x",
        "${a}",
        "it's",
        "1_0",
        "2024-01-31",
        "y",
        "\u00e9",
        "*a",
    ],
)
def test_a_written_text_reads_back_as_the_same_text(text: str) -> None:
    written = read_yaml(to_text({"key": text, text or "empty": [text]}).replace("\\${", "${")).data
    assert written == {"key": text, text or "empty": [text]}


@pytest.mark.parametrize("number", [1e-5, 3e-4, 1e22, 0.1, 1 / 3, 5e-324, 0, -3, 2**70])
def test_a_written_number_reads_back_as_the_same_number(number: float) -> None:
    read = read_yaml(to_text({"key": number})).data["key"]
    assert (type(read), read) == (type(number), number)
