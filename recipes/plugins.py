"""The plugins of a recipe: files whose transitions it may name, run before anything in it is validated."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statemix.transitions.plugin import PluginError, load_plugin

from .errors import Fault, RecipeError


def load_plugins(data: dict[Any, Any], folder: Path) -> list[Fault]:
    """Run the files under ``plugins``, which are relative to ``folder``, and write their full paths in their place.

    Whatever is no list of texts is left to validation.
    """
    files = data.get("plugins")
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        return []
    faults = []
    for index, file in enumerate(files):
        path = Path(os.path.abspath(folder / file))
        twin = next((other for other in files[:index] if Path(other).name == path.name), None)
        try:
            if twin is not None and Path(twin) != path:
                raise PluginError(f"expected files of different names, got {file} and {twin}; rename one")
            load_plugin(path)
        except PluginError as error:
            faults.append(Fault(("plugins", index), str(error)))
        files[index] = str(path)
    return faults


def add_plugins(data: dict[Any, Any], files: Sequence[str | os.PathLike[str]]) -> None:
    """Append ``files``, relative to the current folder, to the plugins of a recipe.

    Raises:
        RecipeError: one of them cannot be used.
    """
    for file in files:
        try:
            load_plugin(Path(file))
        except PluginError as error:
            raise RecipeError(f"plugin {error}") from None
    named = data.setdefault("plugins", [])
    if isinstance(named, list):
        named += [path for path in map(os.path.abspath, files) if path not in named]
