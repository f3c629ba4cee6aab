"""Who imports whom: dependencies point one way, and ``import statemix`` stays light."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Each folder may import those before it in the chain; nothing but benchmarks and the umbrella (src/statemix) imports
# the harness, nothing but the umbrella imports benchmarks.
CHAIN = ("plugins", "kernels", "transitions", "mixers", "blocks", "tasks", "recipes", "training")
ALLOWED = {folder: set(CHAIN[:position]) for position, folder in enumerate(CHAIN)}
ALLOWED["harness"] = {"plugins", "kernels", "transitions", "mixers"}
ALLOWED["benchmarks"] = {"kernels", "transitions", "mixers", "recipes", "harness"}
ALLOWED["statemix"] = {*CHAIN, "harness", "benchmarks"}

# What a user who only wants scan need not have, or need not wait for.
LEFT_ALONE = ("triton", "matplotlib", "tensorboard", "rich", "omegaconf")


def folders_imported_by(source: str) -> set[str]:
    """The folders that absolute imports name: ``import statemix.kernels.x``, ``from statemix import kernels``."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    parts = (name.split(".") for name in names)
    return {part[1] if part[1:] and part[1] in ALLOWED else "statemix" for part in parts if part[0] == "statemix"}


@pytest.mark.parametrize(
    ("source", "folders"),
    [
        ("from statemix.kernels.chunk import scan", {"kernels"}),
        ("from statemix import kernels, scan", {"kernels", "statemix"}),
        ("import statemix.training.loop as loop", {"training"}),
        ("def late():\n    import statemix", {"statemix"}),
        ("from .base import Transition\nimport statemix_extras, torch.nn", set()),
    ],
)
def test_every_way_to_import_a_folder_is_seen(source: str, folders: set[str]) -> None:
    assert folders_imported_by(source) == folders


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    files = sorted((ROOT / "src" / folder if folder == "statemix" else ROOT / folder).rglob("*.py"))
    assert files
    wrong = {}
    for file in files:
        source = file.read_text(encoding="utf-8")
        # Inside a folder imports are relative, but in a folder of it, and in a script that may be run by its path.
        own = {folder} if file.parent.name != folder or '__name__ == "__main__"' in source else set()
        if found := folders_imported_by(source) - ALLOWED[folder] - own:
            wrong[str(file.relative_to(ROOT))] = sorted(found)
    assert not wrong, f"{folder} may import {sorted(ALLOWED[folder])} absolutely, and itself relatively"


def modules() -> dict[str, Path]:
    """Every module of the package with its file."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        folders = tomllib.load(file)["tool"]["setuptools"]["package-dir"]
    return {
        package if file.stem == "__init__" else f"{package}.{file.stem}": file
        for package, folder in folders.items()
        for file in (ROOT / folder).glob("*.py")
    }


def modules_imported_by(module: str, files: Mapping[str, Path]) -> set[str]:
    """Modules of the package that one names, in functions too; a name of a package counts as the package."""
    package = module if files[module].stem == "__init__" else module.rpartition(".")[0]
    named = set()
    for node in ast.walk(ast.parse(files[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            inner = {f"{origin}.{alias.name}" for alias in node.names}
            named |= inner & files.keys() or {origin}
    return named & files.keys() - {module}


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = modules()
    graph = {module: modules_imported_by(module, files) for module in files}
    assert graph["statemix.transitions.product"] >= {"statemix.transitions.base", "statemix.transitions.householder"}
    TopologicalSorter(graph).prepare()  # a CycleError names the files


def test_scan_runs_without_triton_and_imports_nothing_it_does_not_need() -> None:
    script = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import statemix
import torch
from statemix.transitions import Identity

q = k = v = torch.ones(1, 3, 1, 2)
assert statemix.scan(q, k, v, Identity()).output.shape == (1, 3, 1, 2)
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & set({LEFT_ALONE!r})))
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
