"""The plugins of a recipe: files whose transitions it may name, run before anything in it is validated."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statemix.plugins import PluginError, load_file

from .errors import Fault, RecipeError


def load_plugins(data: dict[Any, Any], folder: Path) -> list[Fault]:
    """Run the files under ``plugins``, which are relative to ``folder``, and write their full paths in their place.

    Whatever is no list of texts is left to validation, and an interpolation to a second call.
    """
    files = _named_by(data)
    faults = []
    for index, file in enumerate(files):
        if "${" in file:
            continue
        path = Path(os.path.abspath(folder / file))
        try:
            twin = _twin(path, files[:index])
            if twin is not None and twin != path:
                raise PluginError(f"expected files of different names, got {file} and {twin}; rename one")
            load_file(path)
        except PluginError as error:
            faults.append(Fault(("plugins", index), str(error)))
        files[index] = str(path)
    return faults


def add_plugins(data: dict[Any, Any], files: Sequence[str | os.PathLike[str]]) -> None:
    """Append ``files``, relative to the current folder, to those that ``load_plugins`` has run.

    A copy of one that the recipe names already is left out.

    Raises:
        RecipeError: one of them cannot be used, or has the name of another but not its text.
    """
    for path in map(Path, map(os.path.abspath, files)):
        named = _named_by(data)
        twin = _twin(path, named)
        try:
            if twin is None:
                load_file(path)
                data["plugins"] = [*named, str(path)]
            elif path.read_bytes() != twin.read_bytes():
                raise PluginError(
                    f"{path}: expected the text of {twin}, got another; restore it, or rename one of them"
                )
        except PluginError as error:
            raise RecipeError(f"plugin {error}") from None


def _named_by(data: dict[Any, Any]) -> list[str]:
    files = data.get("plugins")
    return files if isinstance(files, list) and all(isinstance(file, str) for file in files) else []


def _twin(path: Path, others: Sequence[str]) -> Path | None:
    return next((Path(other) for other in others if Path(other).name == path.name), None)
