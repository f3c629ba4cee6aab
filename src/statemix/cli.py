"""The command line: ``show``, ``train``, ``generate``, ``profile`` a model; ``check``, ``try``, ``bench`` a recurrence;
``env``.

Exit codes: 0 done; 1 the training met a nan or inf, or a check failed; 2 bad input; 130 interrupted by Ctrl-C.
A command imports what it runs when it runs, so that ``--help`` and mistyped options need not wait for it.
"""

import argparse
import itertools
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from . import __version__

if TYPE_CHECKING:
    from statemix.recipes import Recipe

Run = Callable[[argparse.Namespace], int]
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# What a wrong path leads to. Any other OSError, a full disk say, is no mistake in the command.
WRONG_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. As argparse does, ``--help`` and unknown options raise SystemExit."""
    arguments = _parse(argv)
    try:
        run: Run = arguments.run
        return run(arguments)
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
    task = load(arguments.folder / "recipe.yaml").training.task.type
    if task != "text":
        raise ValueError(f"folder: expected a model trained on text, got task {task} in {arguments.folder}")
    tokens = generate(
        model,
        torch.tensor([list(arguments.prompt)]),
        max_new_tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        generator=torch.Generator().manual_seed(arguments.seed),
    )
    print(bytes(token for token in tokens[0].tolist() if token < 256).decode(errors="replace"))
    return 0


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
    from .bench_command import run_bench

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


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = "Sequence mixers around one recurrence: inspect, train, generate."
    parser = argparse.ArgumentParser("statemix", description=about)
    parser.add_argument("--version", action="version", version=f"statemix {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_show(commands)
    _add_train(commands)
    _add_generate(commands)
    _add_check(commands)
    _add_try(commands)
    _add_profile(commands)
    _add_bench(commands)
    _add_env(commands)
    # Overrides may also stand behind options, where argparse takes no positional arguments any more.
    arguments, rest = parser.parse_known_args(argv)
    overrides = [text for text in rest if "overrides" in arguments and not text.startswith("-")]
    if len(overrides) < len(rest):
        parser.error(f"unrecognized arguments: {' '.join(text for text in rest if text not in overrides)}")
    if overrides:
        arguments.overrides += overrides
    return arguments


def _add_show(commands: Commands) -> None:
    command = _add_command(
        commands,
        "show",
        _show,
        summary="print the layers of a recipe: mixer, M_t, parameters, state bytes",
        example="statemix show recipes/quickstart.yaml layers.delta.mixer.transition=kda --seq-len 4096",
    )
    _add_recipe(command)
    command.add_argument("--seq-len", type=_whole_from(1), metavar="N", help="tokens seen when the state is measured")


def _add_train(commands: Commands) -> None:
    command = _add_command(
        commands,
        "train",
        _train,
        summary="train the model of a recipe, score it on held-out data and save it in a run folder",
        example="statemix train recipes/quickstart.yaml layers.delta.mixer.transition=gla --out runs/gla",
    )
    _add_recipe(command)
    out_help = "run folder, new or empty; default: runs/NAME of the recipe, or else the first free of runs/NAME-2, ..."
    command.add_argument("--out", type=Path, metavar="DIR", help=out_help)
    command.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the run folder")
    either = command.add_mutually_exclusive_group()
    either.add_argument("--compare", metavar="RECIPE", help="train this one too, on the same data, and compare")
    either.add_argument("--stop-after", type=_whole_from(1), metavar="N", help="save and stop after step N")
    command.add_argument("--device", metavar="cpu|cuda", help="default: the GPU if there is one")
    command.add_argument("--tuned", type=Path, metavar="FILE", help="tiles for the kernels, from statemix bench --tune")


def _add_generate(commands: Commands) -> None:
    command = _add_command(
        commands,
        "generate",
        _generate,
        summary="continue a text with a trained model",
        example='statemix generate runs/quickstart --prompt "def main(" --tokens 400 --temperature 0.5',
    )
    command.add_argument("folder", metavar="DIR", type=Path, help="run folder")
    command.add_argument("--prompt", type=_some_text, required=True, metavar="TEXT", help="the text to continue")
    command.add_argument("--tokens", type=_whole_from(1), default=240, metavar="N", help="bytes to add (default: 240)")
    temperature_help = "0 takes the likeliest byte each time (default: 0.7)"
    command.add_argument("--temperature", type=_temperature, default=0.7, metavar="T", help=temperature_help)
    command.add_argument("--top-k", type=_whole_from(1), metavar="K", help="take one of the K likeliest (default: all)")
    command.add_argument("--seed", type=_whole_from(0), default=0, metavar="S", help="of the sampling (default: 0)")
    _add_trust(command)


def _add_check(commands: Commands) -> None:
    command = _add_command(
        commands,
        "check",
        _check,
        summary="check a new recurrence: shapes, gradients, forms, splits, packing, precision",
        example="statemix check my_recurrence.py:MyTransition",
    )
    command.add_argument("target", metavar="FILE.py:Class", nargs="?", help="the file and its Transition class")
    command.add_argument("--only", metavar="NAME", nargs="+", help="these checks alone")
    command.add_argument(
        "--seed", type=_whole_from(0), default=0, metavar="S", help="of the random inputs (default: 0)"
    )
    command.add_argument(
        "--seq-len", type=_whole_from(1), metavar="N", help="tokens of the random inputs (default: 37)"
    )
    command.add_argument("--slow", action="store_true", help="also the checks that take long")
    command.add_argument("--list", action="store_true", help="name every check, with what it is about")


def _add_try(commands: Commands) -> None:
    command = _add_command(
        commands,
        "try",
        _try,
        summary="is a new recurrence any good? small runs of recall and parity beside DeltaNet and GLA",
        example="statemix try my_recurrence.py:MyTransition --out my_transition.png",
    )
    command.add_argument("target", metavar="FILE.py:Class", help="the file and its Transition class")
    command.add_argument("--out", type=Path, metavar="FILE.png", help="the plot (default: NAME-trial.png)")
    command.add_argument("--seed", type=_whole_from(0), default=0, metavar="S", help="of weights and data (default: 0)")


def _add_profile(commands: Commands) -> None:
    command = _add_command(
        commands,
        "profile",
        _profile,
        summary="profile a few training steps: the costliest operators by layer, and a trace for TensorBoard",
        example="statemix profile recipes/quickstart.yaml training.batch_size=2 --steps 5 --out runs/profile",
    )
    _add_recipe(command)
    out_help = (
        "folder of the trace, new or empty; default: the first free of runs/NAME-profile, runs/NAME-profile-2, ..."
    )
    command.add_argument("--out", type=Path, metavar="DIR", help=out_help)
    command.add_argument("--steps", type=_whole_from(1), default=3, metavar="N", help="steps to profile (default: 3)")
    command.add_argument("--rows", type=_whole_from(1), default=20, metavar="N", help="rows of the table (default: 20)")
    command.add_argument("--device", metavar="cpu|cuda", help="default: the GPU if there is one")


def _add_bench(commands: Commands) -> None:
    command = _add_command(
        commands,
        "bench",
        _bench,
        summary="time recurrences on this machine: forward, forward and backward, memory; or tune their kernels",
        example="statemix bench --op gla kda --key-dim 64 --value-dim 64 --tune --out tuned.json",
    )
    _add_recipe(command, is_required=False)
    command.add_argument(
        "--op",
        metavar="NAME",
        nargs="+",
        help="gla, retnet, deltanet, ... (default: all; with --tune those that stand for the others)",
    )
    sizes = {
        "batch": "default: 8 on a GPU, 1 on a CPU, training.batch_size for a recipe",
        "seq-len": "tokens (default: 2048 on a GPU, 512 on a CPU, training.seq_len for a recipe)",
        "num-heads": "query and key heads (default: 16 on a GPU, 4 on a CPU)",
        "num-value-heads": "value heads, a multiple of the heads (default: as many)",
        "key-dim": "channels of a query and key head (default: 128 on a GPU, 64 on a CPU)",
        "value-dim": "channels of a value head (default: --key-dim)",
    }
    for name, text in sizes.items():
        command.add_argument(f"--{name}", type=_whole_from(1), metavar="N", help=text)
    dtypes = ("bfloat16", "float16", "float32")
    command.add_argument("--dtype", choices=dtypes, help="default: bfloat16 on a GPU, float32 on a CPU")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU if there is one")
    command.add_argument("--tuned", type=Path, metavar="FILE", help="tiles for the kernels, from an earlier --tune")
    tune_help = "try other tiles for heads of this size on this GPU, each checked before it is timed; takes minutes"
    command.add_argument("--tune", action="store_true", help=tune_help)
    command.add_argument("--out", type=Path, metavar="FILE", help="where --tune writes what it chose")


def _add_env(commands: Commands) -> None:
    _add_command(
        commands,
        "env",
        _env,
        summary="print versions and devices, and which forms can run here and why not",
        example="statemix env",
    )


def _add_command(commands: Commands, name: str, run: Run, *, summary: str, example: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(run=run)
    return command


def _add_recipe(command: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    recipe_help = "YAML file, or the name of a recipe that comes with statemix"
    command.add_argument("recipe", metavar="RECIPE", nargs=None if is_required else "?", help=recipe_help)
    overrides_help = "values to change, such as training.steps=100 or layers.delta.mixer.transition=gla"
    command.add_argument("overrides", metavar="key=value", nargs="*", help=overrides_help)
    plugin_help = "Python file with transitions, mixers or other parts of your own; may be repeated"
    command.add_argument("--plugin", action="append", default=[], type=Path, metavar="FILE.py", help=plugin_help)
    _add_trust(command)


def _add_trust(command: argparse.ArgumentParser) -> None:
    trust_help = "run the Python files that a run folder brings, which are code of whoever made it"
    command.add_argument("--trust-plugins", action="store_true", help=trust_help)


def _whole_from(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} up, got {text!r}")
        return int(text)

    return whole


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0 up, got {text!r}")
    return value


def _some_text(text: str) -> bytes:
    if not text:
        raise argparse.ArgumentTypeError("expected some text, got none; the model continues what it is given")
    # The bytes as the shell gave them, whether or not they are UTF-8.
    return os.fsencode(text)
