"""The README is short and true: its Python runs, its recipes load, its map names every folder, its links lead on."""

import re
from pathlib import Path

import pytest

from statemix.recipes import load

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")

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


def test_the_map_names_every_folder_once() -> None:
    [(_, text)] = blocks("text")
    named = [line.split("/ ")[0] for line in text.splitlines()]
    folders = [path for path in ROOT.iterdir() if path.is_dir() and any(path.iterdir()) and path.name[0] != "."]
    expected = [path.name for path in folders if path.name not in NOT_MAPPED and path.suffix != ".egg-info"]
    assert sorted(named) == sorted([*expected, "src/statemix"])


def test_the_links_lead_to_files_and_headings() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", TEXT)
    assert links
    for file, anchor in links:
        assert (ROOT / file).is_file(), f"no such file as {file}"
        headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, f"{file}#{anchor}"


def test_a_newcomer_reads_it_in_two_screens() -> None:
    assert len(TEXT.splitlines()) <= 120
