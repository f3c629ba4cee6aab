"""Count the lines of code of each folder of the package, and hold it to its limits; exit code 1 over any of them.

A line of code holds a token that is neither a comment nor a docstring. The length of a function is counted in the same
way, its decorators and signature included. Functions that Triton compiles are left out of the lengths, since they are
written out in full; they are held to a number of parameters instead, unless the docstring says why ("parameters").
"""

import ast
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASUREMENT = "statemix.benchmarks"
# Lines only go down: lower these where they have. The aim is 12,000 for the package and 4,300 for the kernels.
LIMITS = {"package without measurement": 12750, "kernels": 4600, "median function": 6, "p90 function": 20}
FILE_LIMIT, PARAMETER_LIMIT = 300, 25
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(file: Path, tree: ast.Module) -> set[int]:
    """The numbers of the lines that hold code."""
    with file.open("rb") as source:
        tokens = [token for token in tokenize.tokenize(source.readline) if token.type not in NO_CODE]
    lines = {line for token in tokens[1:] for line in range(token.start[0], token.end[0] + 1)}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [x.body[0] for x in ast.walk(tree) if isinstance(x, documented) and ast.get_docstring(x) is not None]
    return lines - {line for x in found for line in range(x.lineno, (x.end_lineno or x.lineno) + 1)}


def num_parameters(function: Function) -> int:
    arguments = function.args
    return len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])


def is_compiled(function: Function) -> bool:
    """Whether Triton compiles it."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def main() -> int:
    rooms, lengths, faults = Counter[str](), list[int](), list[str]()
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    for package, file in ((name, file) for name, folder in packages.items() for file in (ROOT / folder).glob("*.py")):
        tree, place = ast.parse(file.read_bytes()), file.relative_to(ROOT)
        lines = code_lines(file, tree)
        rooms[package] += len(lines)
        if len(lines) > FILE_LIMIT:
            faults.append(f"{place}: {len(lines)} lines, at most {FILE_LIMIT}")
        for function in (node for node in ast.walk(tree) if isinstance(node, Function)):
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            if not is_compiled(function):
                lengths.append(len(lines & set(range(first, (function.end_lineno or first) + 1))))
            elif num_parameters(function) > PARAMETER_LIMIT and "parameters" not in (ast.get_docstring(function) or ""):
                count = num_parameters(function)
                faults.append(f"{place}: {function.name}: {count} parameters, at most {PARAMETER_LIMIT}")
    figures = {
        "package without measurement": rooms.total() - rooms[MEASUREMENT],
        "kernels": sum(count for room, count in rooms.items() if room.startswith("statemix.kernels")),
        "median function": statistics.median(lengths),
        "p90 function": statistics.quantiles(lengths, n=10)[-1],
    }
    faults += [f"{name}: {figures[name]:g}, at most {limit}" for name, limit in LIMITS.items() if figures[name] > limit]
    print(", ".join(f"{room.removeprefix('statemix.')} {count}" for room, count in rooms.items()))
    print(", ".join(f"{name} {value:g}" for name, value in figures.items()))
    print("\n".join(faults), end="\n" if faults else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
