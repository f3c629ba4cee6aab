"""tools/code_lines.py: what counts as a line of code, and what breaks a limit."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""A docstring,
of two lines."""

import triton  # a comment


@triton.jit(do_not_specialize=["T"])
def kernel(a, b, T):
    """Adds."""

    # alone on its line
    return (
        a + b
    )


TEXT = """not a docstring,
two lines"""
'''


@pytest.fixture
def code_lines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("code_lines", ROOT / "tools" / "code_lines.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blank_lines_comments_and_docstrings_are_no_code(code_lines: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(SOURCE)
    lines = SOURCE.splitlines()
    found = [lines[number - 1].strip() for number in sorted(code_lines.code_lines(file, ast.parse(SOURCE)))]
    assert found == [
        "import triton  # a comment",
        '@triton.jit(do_not_specialize=["T"])',
        "def kernel(a, b, T):",
        "return (",
        "a + b",
        ")",
        'TEXT = """not a docstring,',
        'two lines"""',
    ]


@pytest.mark.parametrize(("docstring", "code"), [("Adds.", 1), ("Adds; so many parameters because it must.", 0)])
def test_a_kernel_of_many_parameters_says_why(
    code_lines: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    docstring: str,
    code: int,
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.setuptools.package-dir]\n"statemix.kernels" = "kernels"\n')
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text(SOURCE.replace("Adds.", docstring) + "\n\ndef f(): ...\ndef g(): ...\n")
    monkeypatch.setattr(code_lines, "ROOT", tmp_path)
    assert code_lines.main() == 0
    monkeypatch.setattr(code_lines, "PARAMETER_LIMIT", 2)
    assert code_lines.main() == code
    printed = capsys.readouterr().out
    assert "package without measurement 10, kernels 10, median function 1" in printed
    assert ("kernels/a.py: kernel: 3 parameters, at most 2" in printed) == bool(code)


def test_a_limit_that_is_broken_is_named(
    code_lines: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(code_lines, "LIMITS", {"kernels": 10})
    monkeypatch.setattr(code_lines, "FILE_LIMIT", 100)
    assert code_lines.main() == 1
    printed = capsys.readouterr().out
    assert "kernels: " in printed and ", at most 10" in printed and "lines, at most 100" in printed
