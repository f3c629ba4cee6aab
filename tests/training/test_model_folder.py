"""Saving and loading a model, and what is refused by name."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from statemix.recipes import Recipe, build
from statemix.training import load_model, save_model
from statemix.training.model_folder import Difference, first_difference

MakeRecipe = Callable[..., Recipe]
Change = Callable[[dict[str, Tensor]], object]

TOKENS = torch.arange(14).reshape(2, 7)


def same_tensors(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_loaded_model_is_the_saved_one(tied: str, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    model = build(make_recipe(f"model.tie_embeddings={tied}"))
    save_model(model, tmp_path / "new" / "folder")
    loaded = load_model(tmp_path / "new" / "folder")
    assert same_tensors(model, loaded)
    assert loaded.recipe == model.recipe
    assert torch.equal(model(TOKENS)[0], loaded(TOKENS)[0])
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())
    assert (loaded.head_weight is loaded.embedding.weight) is (tied == "true")


def test_a_tied_weight_is_stored_once(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    model = build(make_recipe("model.tie_embeddings=true"))
    save_model(model, tmp_path / "folder")
    stored = load_file(tmp_path / "folder" / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == sum(p.numel() for p in model.parameters())


def test_loading_a_model_leaves_the_random_numbers_alone(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    save_model(build(make_recipe()), tmp_path / "folder")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(tmp_path / "folder")
    assert torch.equal(torch.rand(3), expected)


def rewrite(path: Path, change: Change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), r"expected a tensor 'norm\.weight', got none"),
        (lambda t: t.update(extra=torch.zeros(1)), "got an unexpected 'extra'"),
        (lambda t: t.update({"norm.weight": torch.ones(17)}), r"expected 'norm\.weight' of shape \[16\], got \[17\]"),
        (lambda t: t.update({"norm.weight": torch.ones(16).double()}), r"expected 'norm\.weight' in torch\.float32"),
    ],
)
def test_a_missing_unexpected_or_ill_shaped_tensor_is_named(
    change: Change, message: str, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    save_model(build(make_recipe()), tmp_path / "folder")
    rewrite(tmp_path / "folder" / "model.safetensors", change)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "folder")


@pytest.mark.parametrize(("saved", "wanted"), [("true", "false"), ("false", "true")])
def test_tied_and_untied_weights_do_not_mix(saved: str, wanted: str, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    save_model(build(make_recipe(f"model.tie_embeddings={saved}")), tmp_path / "folder")
    (tmp_path / "folder" / "recipe.yaml").write_text(make_recipe(f"model.tie_embeddings={wanted}").to_yaml())
    with pytest.raises(ValueError, match=r"model\.tie_embeddings"):
        load_model(tmp_path / "folder")
    # Weights without metadata come from elsewhere; the key is named then.
    rewrite(tmp_path / "folder" / "model.safetensors", lambda tensors: None)
    with pytest.raises(ValueError, match=r"'head\.weight'"):
        load_model(tmp_path / "folder")


def test_weights_of_another_recipe_are_refused_even_when_every_shape_fits(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    save_model(build(make_recipe()), tmp_path / "folder")
    (tmp_path / "folder" / "recipe.yaml").write_text(make_recipe("layers.window.mixer.window=9").to_yaml())
    with pytest.raises(ValueError, match=r"layers\.window\.mixer\.window is 7 there, 9 here"):
        load_model(tmp_path / "folder")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_comes_back_in_its_own_dtype(dtype: torch.dtype, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    model = build(make_recipe()).to(dtype)
    save_model(model, tmp_path / "folder")
    loaded = load_model(tmp_path / "folder")
    assert next(loaded.parameters()).dtype == dtype and same_tensors(model, loaded)


def test_weights_from_before_a_key_of_the_model_had_been_thought_of_still_load(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    save_model(build(make_recipe()), tmp_path)
    file = tmp_path / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        origin = json.loads(opened.metadata()["statemix"])
    older = yaml.safe_load(origin["recipe"])
    del older["model"]["norm"]
    origin["recipe"] = yaml.safe_dump(older)
    save_file(load_file(file), file, metadata={"statemix": json.dumps(origin)})
    load_model(tmp_path)


def test_a_model_without_weights_is_refused_and_no_folder_is_made(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = build(make_recipe())
    with pytest.raises(ValueError, match="model: expected weights, got a model on the meta device"):
        save_model(model, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("missing", ["recipe.yaml", "model.safetensors"])
def test_a_folder_without_a_model_is_refused_by_name(missing: str, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    save_model(build(make_recipe()), tmp_path / "folder")
    (tmp_path / "folder" / missing).unlink()
    with pytest.raises(ValueError, match=rf"got no {missing} in .*folder"):
        load_model(tmp_path / "folder")


def test_a_file_that_is_no_weight_file_is_refused_by_name(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    save_model(build(make_recipe()), tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a safetensors file"):
        load_model(tmp_path / "folder")


def test_a_model_without_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model: expected one made by statemix\.recipes\.build"):
        save_model(torch.nn.Linear(2, 2), tmp_path / "folder")  # type: ignore[arg-type]
    assert not (tmp_path / "folder").exists()


def test_a_crash_while_saving_leaves_the_model_before_and_no_rubbish(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(make_recipe())
    save_model(first, tmp_path)

    def crash(fd: int) -> None:
        raise OSError("disk full")

    files = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        save_model(build(make_recipe()), tmp_path)
    assert sorted(os.listdir(tmp_path)) == files
    assert same_tensors(load_model(tmp_path), first)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 3}]}}, Difference("a.b.1.c", 2, 3)),
        ({"a": 1}, {"a": 1, "b": 2}, Difference("b", None, 2)),
        ({"a": 1, "b": 2}, {"a": 1}, Difference("b", 2, None)),
        ({"a": [1]}, {"a": [1, 2]}, Difference("a", [1], [1, 2])),
        ({"a": [1]}, {"a": {"b": 1}}, Difference("a", [1], {"b": 1})),
        ({"b": 1, "a": 1}, {"a": 2, "b": 2}, Difference("b", 1, 2)),
    ],
)
def test_the_first_difference_is_named(old: object, new: object, expected: Difference | None) -> None:
    assert first_difference(old, new) == expected
