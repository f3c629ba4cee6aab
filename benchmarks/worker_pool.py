"""Tasks in processes of their own, several at a time: one that dies or hangs costs its task and nothing else.

A kernel that reads out of bounds leaves its process without a usable GPU, and a compiler may abort. So a worker whose
task failed in any way is replaced by a fresh process.
"""

import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Done(Generic[Task, Result]):
    """How a task ended: with ``result``, or else with the reason in ``failure``.

    Attributes:
        seconds: from the moment a worker took it.
    """

    task: Task
    result: Result | None
    failure: str
    seconds: float


@dataclass
class _Worker(Generic[Task]):
    process: SpawnProcess
    connection: Connection
    task: Task
    started: float
    is_ready: bool = False

    def stop(self) -> None:
        self.connection.close()
        self.process.join(timeout=5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def run_isolated(
    function: Callable[[Task], Result],
    tasks: Iterable[Task],
    *,
    num_workers: int,
    timeout_s: float,
    may_start: Callable[[], bool] = lambda: True,
    is_fresh: bool = False,
) -> Iterator[Done[Task, Result]]:
    """Yield every task as it ends, in no order.

    Args:
        function: at the top level of a module, so that another process can import it.
        num_workers: processes at a time.
        timeout_s: after which a task counts as hung, and its process is killed; two minutes more for the imports of a
            new process.
        may_start: asked before each task is handed out; once it says no, the rest is not run and not yielded.
        is_fresh: a new process for every task.
    """
    waiting, workers = deque(tasks), list[_Worker[Task]]()
    context = multiprocessing.get_context("spawn")
    try:
        while workers or waiting:
            while waiting and len(workers) < num_workers and may_start():
                workers.append(_start(context, function, waiting.popleft()))
            if not workers:
                return
            wait([worker.connection for worker in workers], timeout=0.2)
            for worker in list(workers):
                done: Done[Task, Result] | None = _look(worker, timeout_s)
                if done is None:
                    continue
                yield done
                if done.failure or is_fresh or not waiting or not may_start():
                    workers.remove(worker)
                    worker.stop()
                else:
                    worker.task, worker.started = waiting.popleft(), time.monotonic()
                    worker.connection.send(worker.task)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.stop()


def _start(
    context: multiprocessing.context.SpawnContext, function: Callable[[Task], Result], task: Task
) -> _Worker[Task]:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, function))
    process.start()
    theirs.close()
    ours.send(task)
    return _Worker(process, ours, task, time.monotonic())


def _look(worker: _Worker[Task], timeout_s: float) -> Done[Task, Result] | None:
    """What a worker has to say; None while it works."""
    seconds = time.monotonic() - worker.started
    try:
        if not worker.connection.poll():
            if seconds > timeout_s + (0 if worker.is_ready else 120):
                worker.process.kill()
                return Done(worker.task, None, f"hung: no result after {timeout_s:.0f} s", seconds)
            return None
        message = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(timeout=5)
        return Done(worker.task, None, f"crashed: its process ended with code {worker.process.exitcode}", seconds)
    if message is None:  # imports are done, the task begins
        worker.is_ready, worker.started = True, time.monotonic()
        return None
    result, failure = message
    return Done(worker.task, result, failure, seconds)


def _serve(connection: Connection, function: Callable[[Task], Result]) -> None:
    connection.send(None)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        result, failure = None, ""
        try:
            result = function(task)
        except Exception as error:
            failure = _last_words(error)
        connection.send((result, failure))


def _last_words(error: Exception) -> str:
    """The error on one line with the place it came from."""
    text = " ".join(str(error).split())[:400]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({frame.name}, line {frame.lineno})"
