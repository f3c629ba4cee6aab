"""Who imports whom: dependencies point one way, and ``import statemix`` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Each folder may import those before it in the chain; nothing but the umbrella (src/statemix) imports the harness.
CHAIN = ("plugins", "kernels", "transitions", "mixers", "blocks", "recipes", "training")
ALLOWED = {folder: set(CHAIN[:position]) for position, folder in enumerate(CHAIN)}
ALLOWED["harness"] = {"plugins", "kernels", "transitions", "mixers"}
ALLOWED["statemix"] = {*CHAIN, "harness"}

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


def own_name(file: Path, folder: str) -> set[str]:
    """What a file may call its folder: nothing where it lies in it itself."""
    return set() if file.parent.name == folder else {folder}


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    files = sorted((ROOT / "src" / folder if folder == "statemix" else ROOT / folder).rglob("*.py"))
    assert files
    wrong = {
        str(file.relative_to(ROOT)): sorted(found)
        for file in files
        if (found := folders_imported_by(file.read_text(encoding="utf-8")) - ALLOWED[folder] - own_name(file, folder))
    }
    # A folder's own name is not among the allowed ones: inside it imports are relative, but from a folder in it.
    assert not wrong, f"{folder} may import {sorted(ALLOWED[folder])} absolutely, and itself relatively"


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
