"""Where two nested values first differ, for messages about recipes."""

from typing import NamedTuple


class Difference(NamedTuple):
    """A key path such as ``layers.delta.mixer.num_heads`` with the value on either side."""

    path: str
    old: object
    new: object


def first_difference(old: object, new: object, *, path: str = "") -> Difference | None:
    """The first place, in the order of ``old``, where mappings or sequences differ; None when they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            found = first_difference(old.get(key), new.get(key), path=f"{path}.{key}" if path else str(key))
            if found is not None:
                return found
        return None
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            found = first_difference(before, after, path=f"{path}.{index}" if path else str(index))
            if found is not None:
                return found
        return None
    return None if old == new else Difference(path, old, new)
