"""A digest of the code of a kernel: the same for kernels that differ only in names, comments, layout or place.

Names that a function binds become numbers in the order in which they appear, its parameters first; a device function
becomes its own digest, and a constant of a module its value. What belongs to Triton or to Python keeps its name.

One kind of name could still reach a compiler: Triton sorts what both arms of an ``if`` assign, where a run-time value
decides. No kernel has such an ``if``; in one, names would order results and nothing more.
"""

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import triton
import triton.language as tl

_IGNORED = ("ctx", "kind", "type_comment")  # of every node: they say what the rest says, or nothing


def source_digest(kernel: Any) -> str:
    """Digest of a function under ``triton.jit`` and of all device functions below it; the same in every Triton."""
    return _digest(kernel.fn, kernel.noinline)


@cache
def _digest(function: Callable[..., Any], noinline: bool | None) -> str:
    code = [bool(noinline), *_Reader(function).definition()]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


class _Reader:
    """Turns the source of one function into lists of strings and numbers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        (self._function,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        names = [node for node in ast.walk(self._function) if isinstance(node, ast.Name)]
        self._numbers = {name: number for number, name in enumerate(_parameters(function))}
        self._bound = {*self._numbers, *(name.id for name in names if isinstance(name.ctx, ast.Store))}
        self._globals = function.__globals__

    def definition(self) -> list[Any]:
        """Which parameters are compile-time, what they default to, and the body."""
        assert isinstance(self._function, ast.FunctionDef)
        of = self._function.args
        constant = [_is_constexpr(parameter.annotation) for parameter in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
        return [constant, self._read(of.defaults), self._read(of.kw_defaults), self._read(self._function.body)]

    def _read(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self._read(part) for part in node if not _is_docstring(part)]
        if isinstance(node, ast.Name | ast.Attribute):
            return self._read_name(node)
        if isinstance(node, ast.Call) and _is_ours(self._meaning(node.func)):
            return self._read_call(node)
        if isinstance(node, ast.AnnAssign):
            return ["AnnAssign", _is_constexpr(node.annotation), self._read(node.target), self._read(node.value)]
        if isinstance(node, ast.AST):
            fields = (field for field in node._fields if field not in _IGNORED)
            return [type(node).__name__, *(self._read(getattr(node, field)) for field in fields)]
        return repr(node)

    def _read_name(self, node: ast.Name | ast.Attribute) -> Any:
        meaning = self._meaning(node)
        if _is_ours(meaning):
            return ["function", source_digest(meaning)]
        if isinstance(meaning, tl.constexpr | bool | int | float | str):
            return ["Constant", repr(getattr(meaning, "value", meaning))]
        if isinstance(meaning, ModuleType):
            return meaning.__name__
        if isinstance(node, ast.Attribute):
            return ["Attribute", self._read(node.value), node.attr]
        return self._numbers.setdefault(node.id, len(self._numbers)) if node.id in self._bound else node.id

    def _read_call(self, node: ast.Call) -> Any:
        """A call of a device function; its arguments in the order of their evaluation, by the parameter's place."""
        callee = self._meaning(node.func)
        parameters = _parameters(callee.fn)
        places = [*range(len(node.args)), *(parameters.index(str(keyword.arg)) for keyword in node.keywords)]
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        return ["call", source_digest(callee), places, self._read(values)]

    def _meaning(self, node: ast.AST) -> Any:
        """What a name stands for outside the function, or None; Triton's own modules are not looked into."""
        if isinstance(node, ast.Name):
            return None if node.id in self._bound else self._globals.get(node.id)
        if isinstance(node, ast.Attribute):
            module = self._meaning(node.value)
            if isinstance(module, ModuleType) and not _is_of_triton(module.__name__):
                return getattr(module, node.attr, None)
        return None


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _is_constexpr(annotation: ast.expr | None) -> bool:
    return annotation is not None and "constexpr" in ast.unparse(annotation)


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_ours(value: Any) -> bool:
    return isinstance(value, triton.JITFunction) and not _is_of_triton(value.fn.__module__)


def _is_of_triton(module: str) -> bool:
    return module.split(".")[0] == "triton"
