"""The pages of docs/ are true: code runs, commands print what is shown, recipes load, links lead somewhere.

A page runs from top to bottom in a folder of its own. What a fenced block is decides what happens to it:

    python            runs; all blocks of a page share one namespace
    python, yaml title="FILE"  is written to FILE
    yaml              loads, where it is a whole recipe
    diff title="FILE" changes FILE
    console           ``$ statemix``, ``$ pytest`` and ``$ ls`` run, and must print the lines shown, numbers aside
    sh                is not run: for ``make`` and programs that stay open
    text              is not run

A comment before a block may say ``exits with CODE``, where that is not 0, and ``tested with: ARGUMENTS``, appended to
its commands, or ``quickly with: ARGUMENTS``, appended in ``make test`` and not in ``make test-all``.
"""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.image
import pytest
import yaml
from pydantic import BaseModel

from statemix import cli
from statemix.blocks import MLPS, NORMS, CausalLM
from statemix.mixers import MIXERS
from statemix.recipes import Recipe, TrainingConfig, load
from statemix.tasks import TASKS
from statemix.transitions import TRANSITIONS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
NAMES = [page.stem for page in PAGES]

FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!https?:)(?P<file>[^)#]*)(?:#(?P<anchor>[^)]+))?\)")
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
NOT_RUN = {"make", "pip", "tensorboard"}


@dataclass(frozen=True)
class Fence:
    """A fenced block: ``line`` is that of its first line of text, ``note`` what the comment before it says."""

    page: Path
    line: int
    language: str
    title: str
    note: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}, line {self.line}"

    @property
    def exit_code(self) -> int:
        said = re.search(r"exits with (\d+)", self.note)
        return int(said[1]) if said else 0

    def arguments(self, *, quickly: bool) -> list[str]:
        said = re.search(r"(tested|quickly) with: (.*)", self.note)
        return shlex.split(said[2]) if said and (quickly or said[1] == "tested") else []


def fences(page: Path) -> list[Fence]:
    text = page.read_text(encoding="utf-8")
    return [
        Fence(
            page, text.count("\n", 0, m.start("text")) + 1, m["language"], m["title"] or "", m["note"] or "", m["text"]
        )
        for m in FENCE.finditer(text)
    ]


@pytest.fixture(autouse=True)
def process_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each page in a folder of its own; the names and modules that its files bring do not outlive it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("statemix.tasks.token_stream.NEW_TOKENS", 3)  # a sample is part of the output, not of the point
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_runs_from_top_to_bottom(page: Path) -> None:
    run_page(page, quickly=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "quickly with:" in page.read_text()], ids=lambda x: x.stem)
def test_a_page_runs_in_full(page: Path) -> None:
    run_page(page, quickly=False)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_pages_pictures_and_headings(page: Path) -> None:
    for link in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = page if not link["file"] else page.parent / link["file"]
        assert target.is_file(), f"{page.name}: no such file as {link['file']}"
        if link["anchor"]:
            assert link["anchor"] in anchors(target), f"{page.name}: {target.name} has no heading {link['anchor']}"


def test_every_page_is_in_the_navigation_and_in_ascii() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(file for entry in navigation for file in entry.values()) == sorted(page.name for page in PAGES)
    for page in PAGES:
        assert page.read_text(encoding="utf-8").isascii(), page.name


@pytest.mark.parametrize(
    "config",
    [
        *(config for kind in (MIXERS, TRANSITIONS, MLPS, NORMS, TASKS) for config in kind.configs()),
        *(CausalLM.Config, TrainingConfig, Recipe),
    ],
    ids=lambda config: config.__qualname__,
)
def test_every_key_of_a_recipe_is_explained(config: type[BaseModel]) -> None:
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("recipes.md", "training.md"))
    missing = [name for name in config.model_fields if name != "type" and f"`{name}`" not in text]
    assert missing == [], "no row in docs/recipes.md or docs/training.md"


def test_the_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    module = script(DOCS / "figures.py")
    module.draw_all(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        file.name for file in (DOCS / "figures").iterdir()
    )
    for file in tmp_path.iterdir():
        drawn, kept = matplotlib.image.imread(file), matplotlib.image.imread(DOCS / "figures" / file.name)
        # Another version of matplotlib may place the letters differently, which moves few pixels.
        assert drawn.shape == kept.shape and abs(drawn - kept).mean() < 0.02, f"{file.name}: run docs/figures.py"


def test_the_picture_of_speeds_is_drawn_where_they_were_measured(tmp_path: Path) -> None:
    names = ("deltanet", "gla", "mamba2", "kda")
    records = [
        {"op": op, "key_dim": dim, "seq_len": n, "form": form, "forward_ms": ms if n < 4096 else None}
        for op in names
        for dim in (64, 128)
        for n in (512, 2048, 4096)
        for form, ms in (("chunk", 1.0), ("recurrent", dim / 16))
    ]
    (tmp_path / "speeds.json").write_text(json.dumps(records))
    module = script(DOCS / "figures.py")
    module.draw_all(tmp_path / "figures", speeds=tmp_path / "speeds.json")
    assert (tmp_path / "figures" / "chunk-against-recurrent.png").is_file()
    panels = [axes for axes in module.draw_speeds(records).axes if axes.axison]
    assert [axes.get_title() for axes in panels] == ["DeltaNet", "GLA", "scalar gate", "KDA"]
    narrow, wide, _ = panels[0].lines
    assert list(narrow.get_ydata()) == [4.0, 4.0] and list(wide.get_ydata()) == [8.0, 8.0]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install statemix[docs]")
    command = ["-P", "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [sys.executable, *command, "--site-dir", str(tmp_path / "site")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "abstraction" / "index.html").is_file()


def run_page(page: Path, *, quickly: bool) -> None:
    """Run the blocks of a page in order."""
    names: dict[str, Any] = {"__name__": "page"}
    for fence in fences(page):
        if fence.title:
            write(fence)
        elif fence.language == "python":
            # Blank lines before it make tracebacks show the line of the page.
            exec(compile("\n" * (fence.line - 1) + fence.text, str(page), "exec"), names)
        elif fence.language == "yaml":
            if "stack:" in fence.text:
                load(yaml.safe_load(fence.text))
        elif fence.language == "console":
            for command, shown in commands(fence):
                run_command(fence, command, shown, quickly=quickly)
        elif fence.language == "sh":
            assert {line.split()[0] for line in fence.text.splitlines()} <= NOT_RUN, f"{fence.place}: would not be run"
        else:
            assert fence.language == "text", f"{fence.place}: no rule for language {fence.language!r}"


def write(fence: Fence) -> None:
    """Make the file that a block is, or change it as a diff says."""
    file = Path(fence.title)
    file.parent.mkdir(parents=True, exist_ok=True)
    if fence.language != "diff":
        file.write_text(fence.text, encoding="utf-8")
        return
    text, lines = file.read_text(encoding="utf-8"), fence.text.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] in " -")
    after = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(before) == 1, f"{fence.place}: {file} does not hold these lines once"
    file.write_text(text.replace(before, after), encoding="utf-8")


def commands(fence: Fence) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that it shows below."""
    found: list[tuple[str, list[str]]] = []
    for line in fence.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip():
            found[-1][1].append(line)
    return found


def run_command(fence: Fence, command: str, shown: list[str], *, quickly: bool) -> None:
    """Run a command; its output must hold the lines shown in that order, others between them or not."""
    program, *arguments = shlex.split(command)
    if program == "statemix":
        arguments += fence.arguments(quickly=quickly)
    code, output = run(program, arguments)
    assert code == fence.exit_code, f"{fence.place}: {command}: exit code {code}\n{output}"
    lines = iter([loose(line) for line in output.replace(f"{Path.cwd()}/", "").splitlines()])
    for line in shown:
        found = any(re.fullmatch(pattern(line), printed) for printed in lines)
        assert found, f"{fence.place}: {command}: expected in its turn:\n{line}\ngot\n{output}"


def run(program: str, arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of a command, in this process where it is ours."""
    if program == "ls":
        return 0, "\n".join(sorted(path.name for path in Path(arguments[0]).iterdir()))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        if program == "statemix":
            code = cli.main(arguments)
        else:
            assert program == "pytest", f"no rule for {program}"
            code = int(pytest.main([*arguments, "-p", "no:cacheprovider"]))
    return code, printed.getvalue()


def pattern(line: str) -> str:
    """What a printed line must match: ``...`` is anything, and a row of a table may go on with other columns."""
    escaped = re.escape(loose(line).rstrip("|")) + "(.*)" * line.startswith("|")
    return escaped.replace(re.escape("..."), ".*")


def loose(line: str) -> str:
    """A line without what changes from run to run: numbers, widths of columns, and rules of tables."""
    return " ".join(NUMBER.sub("#", re.sub(r"-{2,}|={2,}", "-", line)).split())


def anchors(page: Path) -> set[str]:
    """The headings of a page as the site names them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def script(file: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module
