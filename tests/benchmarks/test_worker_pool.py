"""Processes for tasks that may crash, hang or raise: each costs its own task and no other."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from statemix.benchmarks.worker_pool import run_isolated

TASKS = """\
import os, time

def act(task):
    name, number = task
    if name == "raise":
        raise ValueError(f"no {number}")
    if name == "crash":
        os._exit(7)
    if name == "hang":
        time.sleep(600)
    return number, os.getpid()
"""


@pytest.fixture
def act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str, int]], tuple[int, int]]:
    """A function in a module that other processes can import."""
    (tmp_path / "statemix_test_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    function: Callable[[tuple[str, int]], tuple[int, int]] = importlib.import_module("statemix_test_tasks").act
    return function


def test_failures_cost_their_own_task_and_are_named(act: Callable[[tuple[str, int]], tuple[int, int]]) -> None:
    tasks = [("hang", 2), ("work", 1), ("work", 4), ("raise", 3), ("crash", 0)]
    done = {one.task: one for one in run_isolated(act, tasks, num_workers=2, timeout_s=1.0)}
    assert set(done) == set(tasks)
    assert "code 7" in done["crash", 0].failure
    assert "no result after 1 s" in done["hang", 2].failure
    assert "ValueError: no 3 (act, line 6)" in done["raise", 3].failure
    for task in (("work", 1), ("work", 4)):
        result = done[task].result
        assert result is not None and result[0] == task[1] and not done[task].failure


@pytest.mark.slow
def test_a_worker_is_used_again_unless_a_fresh_one_is_wanted(act: Callable[[tuple[str, int]], tuple[int, int]]) -> None:
    tasks = [("work", number) for number in range(3)]
    for is_fresh, processes in ((False, 1), (True, 3)):
        done = run_isolated(act, tasks, num_workers=1, timeout_s=60, is_fresh=is_fresh)
        assert len({one.result[1] for one in done if one.result is not None}) == processes


@pytest.mark.slow
def test_nothing_starts_once_it_may_not(act: Callable[[tuple[str, int]], tuple[int, int]]) -> None:
    answers = iter([True, False])
    done = run_isolated(
        act, [("work", 0), ("work", 1)], num_workers=1, timeout_s=60, may_start=lambda: next(answers, False)
    )
    assert [one.task for one in done] == [("work", 0)]
