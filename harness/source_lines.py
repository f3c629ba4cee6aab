"""Lines of a user's file, to be shown below an error that is about them."""

import inspect
import traceback
from typing import Any


def lines_of(cls: type, method: str) -> str:
    """The source of a method below a line with its place; nothing for a class of the package or without source."""
    if cls.__module__.startswith("statemix."):
        return ""
    function = _function(cls, method)
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        return ""
    numbered = [f"    {number} | {line.rstrip()}" for number, line in enumerate(lines, start=first)]
    return "\n".join([f"\n  {function.__code__.co_filename}:{first}", *numbered])


def failing_line(error: BaseException, cls: type, method: str) -> str:
    """The line of a method's file that raised, or that called what raised; nothing for a method of the package."""
    if cls.__module__.startswith("statemix."):
        return ""
    file = _function(cls, method).__code__.co_filename
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"\n  {file}:{frames[-1].lineno}\n    {frames[-1].lineno} | {frames[-1].line}" if frames else ""


def _function(cls: type, method: str) -> Any:
    """The function of a method or property as it was written, without what the base class wraps around it."""
    attribute: Any = getattr(cls, method)
    function: Any = attribute.fget if isinstance(attribute, property) else attribute
    return inspect.unwrap(function)
