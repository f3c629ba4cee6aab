"""What is installed: the package list, the wheel, and how source files are written."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]

MADE_BY_COMMANDS = {"build", "dist", "runs"}
NOT_INSTALLED = {"tests", "examples", "docs", "tools"}


def source_folders() -> list[Path]:
    """The folders at the root that people write."""
    return [
        folder
        for folder in ROOT.iterdir()
        if folder.is_dir() and folder.name not in MADE_BY_COMMANDS and not folder.name.startswith(".")
    ]


def test_every_folder_with_an_init_is_installed() -> None:
    inits = [
        init for folder in source_folders() if folder.name not in NOT_INSTALLED for init in folder.rglob("__init__.py")
    ]
    folders = {init.parent.relative_to(ROOT).as_posix() for init in inits}
    assert folders == set(SETUPTOOLS["package-dir"].values())


def test_every_package_in_the_map_is_listed_under_the_name_of_its_folder() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(SETUPTOOLS["package-dir"])
    for package, folder in SETUPTOOLS["package-dir"].items():
        assert folder == "src/statemix" if package == "statemix" else package == "statemix." + folder.replace("/", ".")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel, built from a copy: setuptools would leave build/ in the tree and take old files from it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    for folder in SETUPTOOLS["package-dir"].values():
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(out)]
    command = [sys.executable, "-P", "-m", "pip", "wheel", *options, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        return archive.namelist()


def test_the_wheel_holds_every_source_and_recipe_and_the_typing_marker(wheel: list[str]) -> None:
    expected = {"statemix/py.typed"}
    for package, folder in SETUPTOOLS["package-dir"].items():
        files = [*(ROOT / folder).glob("*.py"), *(ROOT / folder).glob("*.yaml")]
        expected |= {f"{package.replace('.', '/')}/{file.name}" for file in files}
    assert {name for name in wheel if not name.startswith("statemix-")} == expected


def test_python_files_are_ascii() -> None:
    files = [file for folder in source_folders() for file in folder.rglob("*.py")]
    assert files
    assert [str(file.relative_to(ROOT)) for file in files if not file.read_bytes().isascii()] == []


def test_every_file_says_in_its_first_line_what_it_holds() -> None:
    files = [file for folder in SETUPTOOLS["package-dir"].values() for file in (ROOT / folder).glob("*.py")]
    assert files
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    assert [str(file.relative_to(ROOT)) for file, tree in trees.items() if not ast.get_docstring(tree)] == []
