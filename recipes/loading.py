"""From a file, a shipped name or a dict to a validated recipe, and from there to a model."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from statemix.blocks import CausalLM

from .errors import Fault, RecipeError, did_you_mean, shown
from .faults import faults_of
from .interpolation import resolve
from .known_keys import value_at
from .marked_yaml import Document, YamlError, read_yaml
from .overrides import apply_overrides
from .plugins import add_plugins, distrusted, load_installed_plugins, load_plugins
from .recipe import Recipe
from .source import Source

_FOLDER = Path(__file__).parent


def shipped() -> dict[str, Path]:
    """The recipes that come with the package: name and file."""
    return {file.stem: file for file in sorted(_FOLDER.glob("*.yaml"))}


def load(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    plugins: Sequence[str | os.PathLike[str]] = (),
    trust_plugins: bool = False,
) -> Recipe:
    """Read and check a recipe; the Python files that it names under ``plugins`` are run first.

    Args:
        recipe: a YAML file, the name of a shipped recipe (``quickstart``), or the contents as a dict.
        overrides: changes such as ``layers.delta.mixer.transition=gla``, applied in order, before derived values.
        plugins: Python files with parts of your own, relative to the current folder, besides those of the recipe.
        trust_plugins: also run files that the recipe of a run folder names; they are code of whoever made that folder.

    Raises:
        RecipeError: lists every fault with file, line and column (or the override), key path, and what to do.
    """
    if isinstance(recipe, Mapping):
        file, document = None, Document(_plain(recipe), {})
    else:
        file, document = _read_file(recipe)
    data, folder = document.data, Path() if file is None else Path(file).parent
    load_installed_plugins()
    source = Source(file, document.places)
    if file is not None:
        _raise_any(distrusted(data, Path(file), trust_plugins=trust_plugins), source)
    _raise_any(load_plugins(data, folder), source)
    add_plugins(data, plugins)
    applied = apply_overrides(data, overrides, Recipe)
    source = Source(file, document.places, tuple(applied))
    unresolved = resolve(data)
    _raise_any(load_plugins(data, folder), source)  # those that an override names
    try:
        # Strict throughout: true is not 1, 2.0 is not 2, '8' is not 8, whatever the parts themselves allow.
        checked = Recipe.model_validate(data, strict=True)
    except ValidationError as error:
        found = faults_of(error, data, Recipe)
        raise source.error(
            unresolved + [fault for fault in found if not _is_open(value_at(data, fault.path))]
        ) from None
    _raise_any(unresolved, source)
    return checked


def _raise_any(faults: list[Fault], source: Source) -> None:
    if faults:
        raise source.error(faults)


def _plain(value: Any) -> Any:
    """A copy with dicts and lists only, as from a file."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _is_open(value: object) -> bool:
    """An interpolation that could not be resolved: no use in saying that it is not a number."""
    return isinstance(value, str) and "${" in value


def build(recipe: Recipe) -> CausalLM:
    """Make the model of a recipe; ``model.recipe`` is what rebuilds it. Weights follow torch's global seed."""
    sizes = recipe.model.model_dump(exclude={"num_layers"})
    model = CausalLM(CausalLM.Config(**sizes), recipe.layer_configs)
    model.recipe = recipe  # type: ignore[assignment]  # torch types any attribute of a module as a tensor or module
    return model


def _read_file(name: str | os.PathLike[str]) -> tuple[str, Document]:
    file = _find(name)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{name}: expected UTF-8 text, got byte {error.object[error.start]:#04x}") from None
    except OSError as error:
        raise RecipeError(f"{name}: cannot be read: {error.strerror}") from None
    try:
        document = read_yaml(text)
    except YamlError as error:
        raise RecipeError(f"{name}:{error.mark.line}:{error.mark.column}: {error}") from None
    if not isinstance(document.data, dict):
        raise RecipeError(f"{name}: expected a mapping with name, model, layers and stack, got {shown(document.data)}")
    return str(name), document


def _find(name: str | os.PathLike[str]) -> Path:
    file, known = Path(name), shipped()
    if file.is_file():
        return file
    if str(name) in known:
        return known[str(name)]
    if (file / "recipe.yaml").is_file():
        raise RecipeError(f"{name}: expected a recipe, got a folder; name {file / 'recipe.yaml'}")
    if file.is_dir():
        raise RecipeError(f"{name}: expected a recipe, got a folder; name a YAML file in it")
    raise RecipeError(
        f"{name}: no such recipe; name a YAML file or one of {', '.join(known)}{did_you_mean(file.stem, known)}"
    )
