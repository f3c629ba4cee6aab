"""Plugins: Python files and installed packages with parts of one's own, run so that recipes can name those parts.

A file is run as a module of its own. It may import what is installed, but not its neighbours, so that a copy of it in
a run folder is all that a model needs. A copy with the same text gives the same classes.

A package names its modules as entry points of the group ``statemix.plugins``. Classes register themselves by their
decorator; what else a kind of part takes from a module, it takes by ``on_plugin``.
"""

import importlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from .registry import Registry

GROUP = "statemix.plugins"


class PluginError(ValueError):
    """A plugin that cannot be used; the message begins with ``file:`` or ``file:line:`` and shows that line."""


@dataclass(frozen=True)
class Plugin:
    """A module that has been run.

    Attributes:
        file: as it was named.
        source: its text.
        module: what running it made.
    """

    file: Path
    source: bytes
    module: ModuleType

    def classes(self) -> list[type]:
        """The classes defined in it, not those that it imports."""
        return [x for x in vars(self.module).values() if isinstance(x, type) and x.__module__ == self.module.__name__]

    def refusal(self, cls: str, error: Exception) -> PluginError:
        """``error`` at the line of ``class cls``."""
        return PluginError(_shown(self.file, self.source, _line_of(self.source, cls), _described(error)))


# The plugins of this process by module name: a copy of a file must not make its classes a second time.
_PLUGINS: dict[str, Plugin] = {}
_SOURCES: set[bytes] = set()
_TAKERS: list[Callable[[Plugin], bool]] = []


def on_plugin(take: Callable[[Plugin], bool]) -> Callable[[Plugin], bool]:
    """Decorator: ``take`` gets every plugin after it has run, and says whether there was something for it."""
    _TAKERS.append(take)
    return take


@on_plugin
def _has_registered(plugin: Plugin) -> bool:
    return any(cls.__module__ == plugin.module.__name__ for registry in Registry.every for cls in registry.classes())


def load_file(file: Path) -> Plugin:
    """Run a file and let recipes name its parts. Loading a file again changes nothing.

    Raises:
        PluginError: as ``run_file``; no part in it, one that cannot be made from a recipe, a name taken.
    """
    return _taken(run_file(file))


@cache
def load_installed() -> tuple[Plugin, ...]:
    """Import the modules that installed packages name as entry points of ``statemix.plugins``, once a process.

    Raises:
        PluginError: one of them cannot be imported, or brings nothing; names entry point and package.
    """
    return tuple(_load_entry_point(entry) for entry in entry_points(group=GROUP))


def _load_entry_point(entry: EntryPoint) -> Plugin:
    try:
        module = importlib.import_module(entry.module)
        file = Path(module.__file__ or entry.module)
        return _taken(Plugin(file, file.read_bytes() if file.is_file() else b"", module))
    except Exception as error:
        package = entry.dist.name if entry.dist else "an installed package"
        raise PluginError(
            f"{package}: expected a plugin at its entry point {entry.name} = {entry.value}, got "
            f"{_described(error)}; mend or uninstall {package}"
        ) from error


def _taken(plugin: Plugin) -> Plugin:
    found = [take(plugin) for take in _TAKERS]
    if not any(found):
        raise PluginError(
            f"{plugin.file}: expected a class that registers itself, or one that derives from "
            "statemix.transitions.Transition, got none"
        )
    return plugin


def has_run(file: Path) -> bool:
    """Whether the text of this file has been run in this process, under whatever name."""
    return file.is_file() and file.read_bytes() in _SOURCES


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
        with Registry.forgets_on_error(name):
            exec(compile(source, module.__file__, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise PluginError(_shown(file, source, _failing_line(error, module.__file__), _described(error))) from None
    _PLUGINS[name] = Plugin(file, source, module)
    _SOURCES.add(source)
    return _PLUGINS[name]


def _described(error: BaseException) -> str:
    if type(error) in (ValueError, PluginError):
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
