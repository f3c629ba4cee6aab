"""The files of a run folder: replaced whole or not at all; beside recipe.yaml copies of the plugins that it names.

With those the folder rebuilds its model alone.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from statemix.recipes import Recipe, load


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``; renamed to it when the block ends, removed when it raises.

    The rename is atomic within one file system, which a sibling is on. The bytes reach the disk before the rename does,
    or a power cut could leave the new name on an empty file.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def copy_plugins(recipe: Recipe, folder: Path) -> None:
    """Copy the plugins of a recipe into a folder."""
    for file in map(Path, recipe.plugins):
        if file.resolve() != (folder / file.name).resolve():
            with replaced(folder / file.name) as temporary:
                temporary.write_bytes(file.read_bytes())


def carried_yaml(recipe: Recipe) -> str:
    """The recipe as it stands beside copies of its plugins."""
    return recipe.model_copy(update={"plugins": plugin_names(recipe)}).to_yaml()


def plugins_of_run(folder: Path, *, trust_plugins: bool = False) -> list[Path]:
    """The copies that a run folder holds, none where it is no run folder yet; runs them.

    Raises:
        RecipeError: a plugin is not trusted.
    """
    file = folder / "recipe.yaml"
    return list(map(Path, load(file, trust_plugins=trust_plugins).plugins)) if file.is_file() else []


def plugin_names(recipe: Recipe) -> list[str]:
    """The files without their folders; a recipe has no two of one name."""
    return [Path(file).name for file in recipe.plugins]


def refuse_other_plugins(folder: Path, recipe: Recipe) -> None:
    """Raise ValueError where a plugin of ``recipe`` is not, byte for byte, its copy in a run folder; runs neither."""
    for file in map(Path, recipe.plugins):
        copy = folder / file.name
        if copy.is_file() and file.read_bytes() != copy.read_bytes():
            raise ValueError(
                f"plugins: expected {file.name} as it was when the run began, {copy}, got another text in "
                f"{file}; restore it, or start a new run"
            )
