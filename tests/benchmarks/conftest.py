"""The scripts of benchmarks/ as modules, with workers that run here in place of processes."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest

from statemix.benchmarks.worker_pool import Done


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
        module = importlib.import_module(f"statemix.benchmarks.{name}")
        if hasattr(module, "run_isolated"):
            monkeypatch.setattr(module, "run_isolated", run_here)
        monkeypatch.setattr("statemix.benchmarks.timed_scan.run_isolated", run_here)
        return module

    return load
