"""The command line: what each command does with the options that ``options`` has read.

Exit codes: 0 done; 1 the training met a nan or inf, or a check failed; 2 bad input; 130 interrupted by Ctrl-C.
A command imports what it runs when it runs, so that ``--help`` and mistyped options need not wait for it.
"""

import argparse
import itertools
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .options import parse

if TYPE_CHECKING:
    from statemix.recipes import Recipe
    from statemix.tasks import Task


# What a wrong path leads to. Any other OSError, a full disk say, is no mistake in the command.
WRONG_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. As argparse does, ``--help`` and unknown options raise SystemExit."""
    arguments = parse(argv)
    try:
        return COMMANDS[arguments.command](arguments)
    except KeyboardInterrupt:
        return 130
    except WRONG_PATH as error:
        return _fail(error, code=2)
    except ValueError as error:
        if not _is_refusal(error):
            raise
        return _fail(error, code=2)


def _show(arguments: argparse.Namespace) -> int:
    from statemix.recipes import layer_table, load, render

    recipe = load(
        arguments.recipe, arguments.overrides, plugins=arguments.plugin, trust_plugins=arguments.trust_plugins
    )
    print(render(layer_table(recipe, arguments.seq_len)))
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from statemix.recipes import load
    from statemix.training import Interrupted, NonFiniteError, compare, train

    recipe = _recipe_to_train(arguments)
    trust = arguments.trust_plugins
    rival = load(arguments.compare, plugins=arguments.plugin, trust_plugins=trust) if arguments.compare else None
    out = arguments.out or _default_folder(recipe.name, resume=arguments.resume)
    if arguments.out is None:
        print(f"run folder: {out}", flush=True)
    try:
        if rival is None:
            stop_after = arguments.stop_after
            with _tuned(arguments.tuned):
                result = train(recipe, out, resume=arguments.resume, stop_after=stop_after, device=arguments.device)
            print(result.summary())
        else:
            with _tuned(arguments.tuned):
                comparison = compare(recipe, rival, out, resume=arguments.resume, device=arguments.device)
            print(f"{comparison.own.summary()}\n\n{comparison.table()}")
    except NonFiniteError as error:
        return _fail(error, code=1)
    except Interrupted as error:
        _fail(error, code=error.exit_code)
        if rival is not None:
            both = ["train", f"{out}/recipe.yaml", "--compare", arguments.compare, "--out", str(out), "--resume"]
            both += ["--trust-plugins"] * bool(recipe.plugins)
            print(f"statemix: to go on with both: statemix {shlex.join(both)}", file=sys.stderr)
        return error.exit_code
    return 0


def _recipe_to_train(arguments: argparse.Namespace) -> "Recipe":
    """The recipe; one that is resumed may name the parts of its run's plugins, where the user trusts those."""
    from statemix.recipes import RecipeError, load
    from statemix.training import plugins_of_run

    plugins, trust = arguments.plugin, arguments.trust_plugins
    may_take_those_of_the_run = arguments.resume and arguments.out and not plugins
    if may_take_those_of_the_run and trust:
        plugins = plugins_of_run(arguments.out, trust_plugins=True)
    try:
        return load(arguments.recipe, arguments.overrides, plugins=plugins, trust_plugins=trust)
    except RecipeError:
        if may_take_those_of_the_run:
            plugins_of_run(arguments.out)  # says which files would have to be trusted
        raise


def _generate(arguments: argparse.Namespace) -> int:
    import torch

    from statemix.blocks import generate
    from statemix.recipes import load
    from statemix.training import load_model

    # As at the start of training: the first vectorised exp after matrix products can be slightly wrong.
    torch.zeros(4).exp()
    model = load_model(arguments.folder, trust_plugins=arguments.trust_plugins)
    task = load(arguments.folder / "recipe.yaml").build_task()
    prompt = _encoded(task, arguments)
    tokens = generate(
        model,
        torch.tensor([prompt]),
        max_new_tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        generator=torch.Generator().manual_seed(arguments.seed),
    )
    print(task.decode(tokens[0].tolist()))
    return 0


def _encoded(task: "Task", arguments: argparse.Namespace) -> list[int]:
    """The prompt as tokens that the model knows."""
    try:
        tokens = task.encode(arguments.prompt)
    except ValueError as error:
        raise ValueError(f"prompt: {error}") from error
    if tokens is None:
        name = task.config.type
        raise ValueError(f"folder: expected a model trained on text, got task {name} in {arguments.folder}")
    if not tokens or not 0 <= min(tokens) <= max(tokens) < task.vocab_size:
        raise ValueError(f"prompt: expected one or more tokens from 0 to {task.vocab_size - 1}, got {tokens}")
    return tokens


def _check(arguments: argparse.Namespace) -> int:
    import torch

    from statemix.harness.user_file import check_file, list_checks

    if arguments.list:
        print(list_checks())
        return 0
    if arguments.target is None:
        raise ValueError("target: expected FILE.py:Class, got nothing; --list names the checks")
    # As at the start of training: the first vectorised exp after matrix products can be slightly wrong.
    torch.zeros(4).exp()
    with _one_thread():
        report = check_file(
            arguments.target,
            only=arguments.only,
            seed=arguments.seed,
            seq_len=arguments.seq_len,
            include_slow=arguments.slow,
        )
    print(report)
    return 0 if report.ok else 1


def _try(arguments: argparse.Namespace) -> int:
    import torch

    from statemix.harness.user_file import register_file
    from statemix.training.trial import try_transition

    torch.zeros(4).exp()
    name = register_file(arguments.target)
    out = arguments.out or Path(f"{name}-trial.png")
    if not out.parent.is_dir():
        raise ValueError(f"out: expected a file in a folder that exists, got {str(out)!r}; make {out.parent} first")
    with _one_thread():
        report = try_transition(name, name, seed=arguments.seed, show=lambda line: print(line, flush=True))
    report.draw(out)
    print(f"\n{report.table()}\n\nwritten to {out}")
    return 0


@contextmanager
def _one_thread() -> Iterator[None]:
    """On tensors this small a second thread gains nothing, and beside another busy process it costs ten times more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _profile(arguments: argparse.Namespace) -> int:
    from statemix.recipes import load
    from statemix.training.profile import profile_training

    recipe = load(
        arguments.recipe, arguments.overrides, plugins=arguments.plugin, trust_plugins=arguments.trust_plugins
    )
    out = arguments.out or _default_folder(f"{recipe.name}-profile", resume=False)
    print(profile_training(recipe, out, steps=arguments.steps, device=arguments.device).table(arguments.rows))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from statemix.benchmarks.bench_command import run_bench

    with _tuned(arguments.tuned):
        run_bench(arguments)
    return 0


@contextmanager
def _tuned(path: Path | None) -> Iterator[None]:
    """The tiles of a tuning file, where one is given."""
    if path is None:
        yield
        return
    from statemix.kernels.tuning_file import tuned

    with tuned(path):
        yield


def _env(arguments: argparse.Namespace) -> int:
    from .environment import describe_environment

    print(describe_environment())
    return 0


def _default_folder(name: str, *, resume: bool) -> Path:
    """``runs/NAME``; for a new run the first of that, ``runs/NAME-2``, ``runs/NAME-3``, ... that does not exist."""
    first = Path("runs", name)
    if resume:
        return first
    later = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], later) if not folder.exists())


def _fail(error: Exception, *, code: int) -> int:
    print(f"statemix: {error}", file=sys.stderr)
    return code


def _is_refusal(error: ValueError) -> bool:
    """Whether our own code raised it, to refuse its input; out of a library it is a bug, and keeps its traceback."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).startswith("statemix.")


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "show": _show,
    "train": _train,
    "generate": _generate,
    "check": _check,
    "try": _try,
    "profile": _profile,
    "bench": _bench,
    "env": _env,
}
