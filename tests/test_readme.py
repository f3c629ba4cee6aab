"""The README is true: its Python runs, its recipes load, its map names every file."""

import re
from pathlib import Path

import pytest

from statemix.recipes import load

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")

MAPPED_FILE_BY_FILE = ("plugins", "kernels", "transitions", "mixers", "blocks", "tasks", "recipes", "training")
NOT_MAPPED = {"build", "dist", "runs", "src"}  # made by commands; src stands there as src/statemix


def blocks(language: str) -> list[tuple[int, str]]:
    """The fenced blocks in a language: the number of lines before each, and its text."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(TEXT.count("\n", 0, match.start(1)), match[1]) for match in pattern.finditer(TEXT)]


def test_the_blocks_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = {"__name__": "readme"}
    assert blocks("python")
    for lines_before, source in blocks("python"):
        exec(compile("\n" * lines_before + source, str(README), "exec"), names)


def test_the_recipes_load(tmp_path: Path) -> None:
    assert blocks("yaml")
    for lines_before, source in blocks("yaml"):
        file = tmp_path / f"line-{lines_before}.yaml"
        file.write_text(source, encoding="utf-8")
        load(file)


def test_the_map_names_every_folder_and_every_file_of_the_package_once() -> None:
    [(_, text)] = blocks("text")
    named: list[str] = []
    for line in text.splitlines():
        if not line.startswith(" "):
            folder = line.split("/ ")[0]
            named.append(folder)
        named += [f"{folder}/{name}" for name in re.findall(r"(?<=  )[\w.-]+\.(?:py|yaml)\b", line)]
    folders = [path for path in ROOT.iterdir() if path.is_dir() and any(path.iterdir()) and path.name[0] != "."]
    expected = [path.name for path in folders if path.name not in NOT_MAPPED and path.suffix != ".egg-info"]
    expected.append("src/statemix")
    for folder in MAPPED_FILE_BY_FILE:
        files = [*(ROOT / folder).glob("*.py"), *(ROOT / folder).glob("*.yaml")]
        expected += [f"{folder}/{file.name}" for file in files if file.name != "__init__.py"]
    assert len(named) == len(set(named))
    assert sorted(set(expected) - set(named)) == [], "not in the map"
    assert sorted(set(named) - set(expected)) == [], "in the map only"
