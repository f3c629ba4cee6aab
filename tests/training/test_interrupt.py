"""Ctrl-C saves and says how to go on."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from statemix.recipes import Recipe
from statemix.training import Interrupted, train
from statemix.training.loop import deferred_interrupt
from statemix.training.metrics import read_metrics
from statemix.training.run_plan import plan_run

MakeRecipe = Callable[..., Recipe]

PROGRAM = """
import signal
import sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started with it ignored
from statemix.recipes import load
from statemix.training import Interrupted, train
try:
    train(load(sys.argv[1]), sys.argv[2], progress=False, device="cpu")
except Interrupted as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_signal_stops_after_a_step_and_the_run_goes_on_from_there(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe("training.steps=100000", "training.checkpoint_every=100000")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    run = tmp_path / "run"
    arguments = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path / "recipe.yaml"), str(run)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(read_metrics(run / "metrics.jsonl")) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"statemix train {run}/recipe.yaml --out {run} --resume" in out
    start = plan_run(recipe, run, resume=True, stop_after=None, device="cpu").start
    assert start >= 3
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == start
    assert train(recipe, run, resume=True, stop_after=start + 1, progress=False, device="cpu").steps == start + 1


@pytest.fixture
def listens_to_ctrl_c() -> Iterator[None]:
    """A job in the background is started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_ctrl_c")
def test_the_first_signal_is_a_flag_and_the_second_an_interrupt() -> None:
    with deferred_interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_training_runs_in_a_thread_that_gets_no_signals(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    results = []
    recipe = make_recipe("training.steps=1", "training.warmup_steps=0")
    thread = threading.Thread(target=lambda: results.append(train(recipe, tmp_path / "run", progress=False)))
    thread.start()
    thread.join()
    assert len(results) == 1


def test_the_command_to_go_on_is_quoted_for_a_shell() -> None:
    error = Interrupted(7, Path("my runs/a"))
    assert error.command == "statemix train 'my runs/a/recipe.yaml' --out 'my runs/a' --resume"
    assert "step 7" in str(error)
