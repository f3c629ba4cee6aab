"""The plugins of a recipe: files whose parts it may name, run before anything in it is validated.

Files that a recipe names beside it are run, as its author is the one who uses it. Not so in a run folder, which may
come from anybody: there a file is run only when its text has been run in this process already, or when the user trusts
it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from statemix.plugins import PluginError, has_run, load_file, load_installed

from .errors import Fault, RecipeError

# Training writes both beside the recipe.yaml of a run folder, save_model the first.
_OF_A_RUN = ("model.safetensors", "metrics.jsonl")


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


def load_installed_plugins() -> None:
    """Import the plugins of installed packages.

    Raises:
        RecipeError: one of them cannot be used.
    """
    try:
        load_installed()
    except PluginError as error:
        raise RecipeError(f"plugin of {error}") from None


def distrusted(data: dict[Any, Any], recipe: Path, *, trust_plugins: bool) -> list[Fault]:
    """The plugins that must not be run because ``recipe`` lies in a run folder; none for a recipe elsewhere.

    Those that lie outside the folder, or that are not named outright, are refused whatever the user trusts.
    """
    folder = recipe.parent
    if not any((folder / name).exists() for name in _OF_A_RUN):
        return []
    if "${" in str(data.get("plugins")):
        return [
            Fault(("plugins",), "expected the names of files in a run folder, got an interpolation; write them out")
        ]
    return [
        Fault(("plugins", index), message)
        for index, file in enumerate(_named_by(data))
        if (message := _objection(file, folder, trust_plugins=trust_plugins))
    ]


def _objection(file: str, folder: Path, *, trust_plugins: bool) -> str:
    path = folder / file
    if not path.resolve().is_relative_to(folder.resolve()):
        return f"expected a file in the run folder {folder}, got {file}, which lies outside; it is not run"
    if trust_plugins or not path.is_file() or has_run(path):
        return ""
    return (
        f"expected trust in {path}, code that comes with a run folder, got none; read the file, then give "
        "--trust-plugins (in Python trust_plugins=True) to run it"
    )


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
