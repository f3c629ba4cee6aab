"""What can be typed after ``statemix``: the commands, their options and the values these take."""

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from . import __version__

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of one command, with its name in ``command``.

    Raises:
        SystemExit: as argparse does, for ``--help`` and for what is mistyped.
    """
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
        summary="print the layers of a recipe: mixer, M_t, parameters, state bytes",
        example="statemix show recipes/quickstart.yaml layers.delta.mixer.transition=kda --seq-len 4096",
    )
    _add_recipe(command)
    command.add_argument("--seq-len", type=_whole_from(1), metavar="N", help="tokens seen when the state is measured")


def _add_train(commands: Commands) -> None:
    command = _add_command(
        commands,
        "train",
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
        summary="continue a text with a trained model",
        example='statemix generate runs/quickstart --prompt "def main(" --tokens 400 --temperature 0.5',
    )
    command.add_argument("folder", metavar="DIR", type=Path, help="run folder")
    command.add_argument("--prompt", type=_some_text, required=True, metavar="TEXT", help="the text to continue")
    command.add_argument("--tokens", type=_whole_from(1), default=240, metavar="N", help="tokens to add (default: 240)")
    temperature_help = "0 takes the likeliest token each time (default: 0.7)"
    command.add_argument("--temperature", type=_temperature, default=0.7, metavar="T", help=temperature_help)
    command.add_argument("--top-k", type=_whole_from(1), metavar="K", help="take one of the K likeliest (default: all)")
    command.add_argument("--seed", type=_whole_from(0), default=0, metavar="S", help="of the sampling (default: 0)")
    _add_trust(command)


def _add_check(commands: Commands) -> None:
    command = _add_command(
        commands,
        "check",
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
        summary="print versions and devices, and which forms can run here and why not",
        example="statemix env",
    )


def _add_command(commands: Commands, name: str, *, summary: str, example: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(command=name)
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
