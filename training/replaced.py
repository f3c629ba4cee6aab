"""Write a file so that a crash leaves the old one or the new one, never a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of ``path``; renamed to it when the block ends, removed when it raises.

    The rename is atomic within one file system, which a sibling is on. The bytes reach the disk before the rename does,
    or a power cut could leave the new name on an empty file.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in UTF-8."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
