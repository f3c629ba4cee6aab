"""A model on disk: recipe.yaml and model.safetensors in one folder.

A tied weight is stored once, under its first name, and is tied again on load because the recipe says so. The weight
file carries its recipe as metadata, so weights put beside another recipe are refused even where every shape fits.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from statemix.blocks import CausalLM
from statemix.recipes import Recipe, RecipeError, build, load

from .run_files import carried_yaml, copy_plugins, replaced, write_text

RECIPE_FILE = "recipe.yaml"
MODEL_FILE = "model.safetensors"
METADATA_KEY = "statemix"
ARCHITECTURE_KEYS = ("model", "layers", "stack", "replace")


def save_model(model: CausalLM, folder: str | Path) -> None:
    """Write ``recipe.yaml``, its plugins and ``model.safetensors``; the folder is made when it is missing.

    Raises:
        ValueError: the model was not made by ``statemix.recipes.build``, so nothing says how to rebuild it.
    """
    recipe = getattr(model, "recipe", None)
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"model: expected one made by statemix.recipes.build, got {type(model).__name__} without a recipe; "
            "build it from a recipe, or set model.recipe"
        )
    if any(tensor.is_meta for tensor in model.state_dict().values()):
        raise ValueError("model: expected weights, got a model on the meta device; to_empty and reset_parameters first")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(model, folder / MODEL_FILE, recipe=recipe)
    copy_plugins(recipe, folder)
    write_text(folder / RECIPE_FILE, carried_yaml(recipe))


def load_model(
    folder: str | Path, *, device: str | torch.device | None = None, trust_plugins: bool = False
) -> CausalLM:
    """Rebuild the model of a folder written by ``save_model`` or by training, in evaluation mode and its own dtype.

    Args:
        device: where to put it; None is the CPU.
        trust_plugins: run the Python files that the folder brings; they are code of whoever made it.

    Raises:
        ValueError: a file is missing, a plugin is not trusted, or the weights are not those of the recipe; names the
            file and the key.
    """
    folder = Path(folder)
    for name in (RECIPE_FILE, MODEL_FILE):
        if not (folder / name).is_file():
            raise ValueError(
                f"folder: expected {RECIPE_FILE} and {MODEL_FILE}, got no {name} in {str(folder)!r}; "
                "name a folder written by save_model or by training"
            )
    recipe = load(folder / RECIPE_FILE, trust_plugins=trust_plugins)
    # Building draws weights; what the caller draws next must not depend on a model having been loaded.
    with torch.random.fork_rng(devices=[]):
        model = build(recipe)
    model = model.to(_stored_dtype(folder / MODEL_FILE))
    read_weights(model, folder / MODEL_FILE, recipe=recipe)
    return model.to(device or "cpu").eval()


def write_weights(model: nn.Module, path: Path, *, recipe: Recipe, step: int | None = None) -> None:
    """Replace a weight file in one rename; ``step`` marks it as a checkpoint of training."""
    origin = {"format": 1, "recipe": carried_yaml(recipe), "step": step}
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in distinct_tensors(model).items()}
    with replaced(path) as temporary:
        # One key: safetensors writes several in an order that changes from process to process.
        save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(origin)})


def read_weights(model: nn.Module, path: Path, *, recipe: Recipe) -> None:
    """Copy a weight file into ``model``; nothing is copied unless every key, shape and dtype fits.

    Raises:
        ValueError: names the first key that is missing, unexpected or ill-shaped, or where the recipes differ.
    """
    origin = read_origin(path)
    if "recipe" in origin:
        _refuse_another_recipe(yaml.safe_load(origin["recipe"]), recipe, path)
    tensors = distinct_tensors(model)
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
    _refuse_misfits(tensors, stored, path)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(stored[name])


def _stored_dtype(path: Path) -> torch.dtype:
    """Dtype of the first floating-point tensor of a weight file."""
    read_origin(path)
    with safe_open(path, framework="pt") as file:
        dtypes = (file.get_tensor(name).dtype for name in file.keys())
        return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def read_origin(path: Path) -> dict[str, Any]:
    """The ``recipe`` and ``step`` that a weight file carries, empty for a file from elsewhere.

    Raises:
        ValueError: it is no weight file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a safetensors file, got one that cannot be read ({error})") from error
    origin: dict[str, Any] = json.loads(metadata.get(METADATA_KEY, "{}"))
    return origin


def distinct_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a shared one once under its first name."""
    names: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    return {name: tensors[name] for name in names.values()}


def _refuse_another_recipe(stored: Mapping[str, object], recipe: Recipe, path: Path) -> None:
    stored, wanted = _written_now(stored), yaml.safe_load(recipe.to_yaml())
    for key in ARCHITECTURE_KEYS:
        difference = first_difference(stored.get(key), wanted.get(key), path=key)
        if difference is not None:
            raise ValueError(
                f"{path}: expected weights of recipe {recipe.name!r}, got a checkpoint of another recipe: "
                f"{difference.path} is {difference.old!r} there, {difference.new!r} here; use the recipe of the weights"
            )


def _written_now(stored: Mapping[str, object]) -> Mapping[str, object]:
    """A recipe as this version writes it, where it can read it: with the defaults of keys that are newer."""
    try:
        return dict(yaml.safe_load(load({**stored, "plugins": []}).to_yaml()))
    except RecipeError:
        return stored


def _refuse_misfits(tensors: Mapping[str, Tensor], stored: Mapping[str, Tensor], path: Path) -> None:
    advice = "the weights belong to another recipe"
    for name in stored:
        if name not in tensors:
            raise ValueError(f"{path}: expected the tensors of the recipe, got an unexpected {name!r}; {advice}")
    for name, tensor in tensors.items():
        if name not in stored:
            raise ValueError(f"{path}: expected a tensor {name!r}, got none of that name; {advice}")
        found = stored[name]
        if found.shape != tensor.shape:
            raise ValueError(f"{path}: expected {name!r} of shape {[*tensor.shape]}, got {[*found.shape]}; {advice}")
        if torch.promote_types(found.dtype, tensor.dtype) != tensor.dtype:
            raise ValueError(
                f"{path}: expected {name!r} in {tensor.dtype} or narrower, got {found.dtype}; convert the file first"
            )


class Difference(NamedTuple):
    """A key path such as ``layers.delta.mixer.num_heads`` with the value on either side."""

    path: str
    old: object
    new: object


def first_difference(old: object, new: object, *, path: str = "") -> Difference | None:
    """The first place, in the order of ``old``, where mappings or sequences differ; None when they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            found = first_difference(old.get(key), new.get(key), path=f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            found = first_difference(before, after, path=f"{path}.{index}" if path else str(index))
            if found is not None:
                return found
        return None
    return None if old == new else Difference(path, old, new)
