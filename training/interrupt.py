"""Ctrl-C during training: finish the step, save, say how to go on."""

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Interrupted(Exception):
    """Training was stopped by Ctrl-C and a checkpoint is saved; a command line ends with ``exit_code``.

    Attributes:
        step: the step of the checkpoint.
        folder: the run folder.
        command: the command that goes on.
    """

    exit_code = 130  # 128 + SIGINT, as shells report it

    def __init__(self, step: int, folder: Path) -> None:
        self.step = step
        self.folder = folder
        trust = ["--trust-plugins"] * any(folder.glob("*.py"))  # the run's own copies, which have run
        recipe = str(folder / "recipe.yaml")
        self.command = shlex.join(["statemix", "train", recipe, "--out", str(folder), "--resume", *trust])
        super().__init__(f"stopped by Ctrl-C; step {step} is saved in {folder}; to go on: {self.command}")


class InterruptFlag:
    """Whether Ctrl-C came."""

    requested = False


@contextmanager
def deferred_interrupt() -> Iterator[InterruptFlag]:
    """Turn the first Ctrl-C into a flag to be looked at between steps; a second one raises KeyboardInterrupt as usual.

    Signals reach the main thread only, so in another thread the flag is never set.
    """
    flag = InterruptFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def ask_to_stop(signum: int, frame: FrameType | None) -> None:
        flag.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, ask_to_stop)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)
