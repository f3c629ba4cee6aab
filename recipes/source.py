"""Where the values of a recipe come from: a line of a file, or an override."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import Fault, KeyPath, RecipeError, dotted
from .marked_yaml import Place


@dataclass(frozen=True)
class Source:
    """``file`` is None for a recipe given as a dict; ``overrides`` pairs key paths with what the user wrote."""

    file: str | None
    places: Mapping[KeyPath, Place] = field(default_factory=dict)
    overrides: tuple[tuple[KeyPath, str], ...] = ()

    def error(self, faults: list[Fault]) -> RecipeError:
        """All faults as one error."""
        return RecipeError(*(self.describe(fault) for fault in faults))

    def describe(self, fault: Fault) -> str:
        """``file:line:column: key.path: message``."""
        parts = [self.where(fault.path, at_key=fault.at_key), dotted(fault.path), fault.message]
        return ": ".join(part for part in parts if part)

    def where(self, path: KeyPath, *, at_key: bool = False) -> str:
        """The override that set ``path``, or else file, line and column of it or of what it would be in."""
        for overridden, text in reversed(self.overrides):
            sets_it = path[: len(overridden)] == overridden
            brought_it_about = overridden[: len(path)] == path and path not in self.places and path != ()
            if sets_it or brought_it_about:
                return f"override {text}"
        if self.file is None:
            return ""
        for length in range(len(path), 0, -1):
            place = self.places.get(path[:length])
            if place:
                mark = place.key if at_key or length < len(path) else place.value
                return f"{self.file}:{mark.line}:{mark.column}"
        return self.file
