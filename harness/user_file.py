"""A recurrence in a file of its own: ``my_recurrence.py:MyTransition`` as a class, and its report."""

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from statemix.plugins import Plugin, PluginError, load_file, run_file
from statemix.transitions import Transition
from statemix.transitions.modules.fields_module import recipe_name
from statemix.transitions.modules.plugin import transitions_of

from .first_call import expect_callable
from .problem import Sizes
from .recurrence_checks.lowering import lower_is_apply
from .report import HarnessError, Report
from .transition import CHECKS, as_subject, check_transition


def load_transition(target: str) -> type[Transition]:
    """The class that ``FILE.py:Class`` names; ``FILE.py`` is enough where the file has one transition.

    Raises:
        HarnessError: no such file or class, a file that cannot be run (shows the line), a class without ``apply``.
    """
    file, name = _parts(target)
    try:
        plugin = run_file(Path(file))
    except PluginError as error:
        raise HarnessError(str(error)) from None
    cls = _named(plugin, file, name)
    as_subject(cls)
    return cls


def register_file(target: str) -> str:
    """Make the transitions of a file known to recipes; the name they have for the one of ``FILE.py:Class``.

    Raises:
        HarnessError: as ``load_transition``; a transition that cannot be made from hidden states, or a name taken.
    """
    cls = load_transition(target)
    try:
        load_file(Path(_parts(target)[0]))
    except PluginError as error:
        raise HarnessError(str(error)) from None
    return recipe_name(cls)


def check_file(
    target: str,
    *,
    only: Iterable[str] | None = None,
    seed: int = 0,
    seq_len: int | None = None,
    include_slow: bool = False,
) -> Report:
    """Check the transition that ``FILE.py:Class`` names, as ``check_transition`` does.

    Where ``lower`` contradicts ``apply`` the report has that failure alone: all that compares forms would follow it.

    Raises:
        HarnessError: as ``load_transition`` and ``expect_callable``, or an unknown name in ``only``.
    """
    cls = load_transition(target)
    sizes = Sizes() if seq_len is None else replace(Sizes(), seq_len=seq_len)
    expect_callable(cls, sizes, seed=seed)
    call = f"statemix check {target} --seed {seed}" + (f" --seq-len {seq_len}" if seq_len is not None else "")
    if only is None:
        first = check_transition(cls, only=[lower_is_apply.name], seed=seed, sizes=sizes, reproduce=call)
        if not first.ok:
            return replace(first, notes=("the other checks wait for this one",))
    return check_transition(cls, only=only, seed=seed, sizes=sizes, include_slow=include_slow, reproduce=call)


def list_checks() -> str:
    """Name and reason of every check, one a line."""
    width = max(map(len, CHECKS))
    return "\n".join(f"{c.name:<{width}}  {c.reason}{' (slow)' if c.is_slow else ''}" for c in CHECKS.values())


def _parts(target: str) -> tuple[str, str]:
    """File and class; no class where none is named."""
    file, colon, name = target.rpartition(":")
    return (file, name) if colon else (target, "")


def _named(plugin: Plugin, file: str, name: str) -> type[Transition]:
    known = transitions_of(plugin)
    listed = ", ".join(known) or "none"
    if not name:
        if len(known) != 1:
            raise HarnessError(f"{file}: expected FILE.py:Class with one of its transitions, which are: {listed}")
        return next(iter(known.values()))
    if name in known:
        return known[name]
    other = vars(plugin.module).get(name)
    if isinstance(other, type) and issubclass(other, Transition):
        return other  # imported from elsewhere, or the base of another class here
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    got = "no such class" if other is None else f"{type(other).__name__} {name}, which is no Transition"
    hint = f"; did you mean {close[0]}?" if close else ""
    raise HarnessError(f"{file}:{name}: expected one of its transitions, which are: {listed}; got {got}{hint}")
