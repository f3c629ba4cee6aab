"""The scripts of benchmarks/ as modules, with workers that run here in place of processes."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from statemix.worker_pool import Done

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_here(
    function: Callable[[Any], Any],
    tasks: Iterable[Any],
    *,
    may_start: Callable[[], bool] = lambda: True,
    **options: object,
) -> Iterator[Done[Any, Any]]:
    """``run_isolated`` in this process."""
    for task in tasks:
        if not may_start():
            return
        try:
            yield Done(task, function(task), "", 0.5)
        except Exception as error:
            yield Done(task, None, f"{type(error).__name__}: {error}", 0.5)


@pytest.fixture
def load_script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their annotations up
        spec.loader.exec_module(module)
        if hasattr(module, "run_isolated"):
            monkeypatch.setattr(module, "run_isolated", run_here)
        monkeypatch.setattr("statemix.timed_scan.run_isolated", run_here)
        return module

    return load
