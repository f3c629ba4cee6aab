"""Plugins: a Python file with recurrences of one's own, run as a module, its transitions made known to recipes.

A file stands for itself: it may import what is installed, but not its neighbours, so that a copy of it in a run folder
is all that a model needs. A copy with the same text gives the same classes.
"""

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .base import Transition
from .fields_module import fields_module, recipe_name
from .module import TransitionModule
from .registry import register, registered


class PluginError(ValueError):
    """A file that cannot be used; the message begins with ``file:`` or ``file:line:`` and shows that line."""


@dataclass(frozen=True)
class Plugin:
    """A file that has been run.

    Attributes:
        file: as it was named.
        source: its text.
        module: what running it made.
    """

    file: Path
    source: bytes
    module: ModuleType

    def transitions(self) -> dict[str, type[Transition]]:
        """The transitions defined in the file, by the name of the class; bases of others are left out."""
        found = {cls.__name__: cls for cls in self._own_classes() if issubclass(cls, Transition)}
        bases = {base for cls in found.values() for base in cls.__mro__[1:]}
        return {name: cls for name, cls in found.items() if cls not in bases}

    def modules(self) -> list[type[TransitionModule]]:
        """The transition modules defined in the file."""
        return [cls for cls in self._own_classes() if issubclass(cls, TransitionModule)]

    def _own_classes(self) -> list[type]:
        return [x for x in vars(self.module).values() if isinstance(x, type) and x.__module__ == self.module.__name__]


# The plugins of this process by module name: a copy of a file must not make its classes a second time.
_PLUGINS: dict[str, Plugin] = {}


def load_plugin(file: Path) -> Plugin:
    """Run a file and register its transitions, each under the snake_case of its class name.

    A transition whose module the file itself registers keeps that module. Loading a file again changes nothing.

    Raises:
        PluginError: as ``run_file``; no transition in it, one that cannot be made from hidden states, a name taken.
    """
    plugin = run_file(file)
    transitions, modules = plugin.transitions(), plugin.modules()
    if not transitions and not modules:
        raise PluginError(f"{file}: expected a class that derives from statemix.transitions.Transition, got none")
    for name, cls in transitions.items():
        known = registered(recipe_name(cls))
        if known in modules or getattr(known, "transition", None) is cls:
            continue
        try:
            register(fields_module(cls))
        except Exception as error:  # annotations are read here, and may fail in any way
            raise PluginError(_shown(file, plugin.source, _line_of(plugin.source, name), _described(error))) from None
    return plugin


def run_file(file: Path) -> Plugin:
    """Run a Python file as a module of its own, or return what an equal file of that name has made.

    Raises:
        PluginError: there is no such file, or running it raised; shows the line.
    """
    try:
        source = file.read_bytes()
    except OSError as error:
        raise PluginError(f"{file}: expected a Python file, got none that can be read: {error.strerror}") from None
    name = f"statemix_plugin.{file.stem}"
    if name in _PLUGINS and _PLUGINS[name].source == source:
        return _PLUGINS[name]
    module = ModuleType(name)
    module.__file__ = str(file.resolve())
    before = sys.modules.get(name)
    sys.modules[name] = module  # where dataclasses and annotations look their names up
    try:
        exec(compile(source, module.__file__, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise PluginError(_shown(file, source, _failing_line(error, module.__file__), _described(error))) from None
    _PLUGINS[name] = Plugin(file, source, module)
    return _PLUGINS[name]


def _described(error: BaseException) -> str:
    if type(error) is ValueError:
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    if isinstance(error, ModuleNotFoundError):
        return f"{type(error).__name__}: {error}; install it, or put what is needed into this file"
    return f"{type(error).__name__}: {error}"


def _failing_line(error: BaseException, file: str) -> int | None:
    """The last line of ``file`` on the way to an error."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return lines[-1] if lines else None


def _line_of(source: bytes, name: str) -> int | None:
    """The line of ``class name``."""
    lines = source.decode("utf-8", errors="replace").splitlines()
    return next((i for i, line in enumerate(lines, start=1) if line.split("(")[0].split() == ["class", name]), None)


def _shown(file: Path, source: bytes, line: int | None, message: str) -> str:
    """``file:line: message`` with the line below."""
    if line is None:
        return f"{file}: {message}"
    text = source.decode("utf-8", errors="replace").splitlines()[line - 1 : line]
    return "\n".join([f"{file}:{line}: {message}", *(f"    {line} | {found}" for found in text)])
