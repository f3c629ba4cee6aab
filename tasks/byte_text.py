"""Byte-level text: next-byte prediction over a folder, split by file into train and held-out.

A file's side is decided by a hash of its path inside the folder, so it is the same on every machine with the same
files. The score is bits per byte: mean negative log2 probability of the next byte.
"""

import hashlib
import math
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from statemix.plugins import PartConfig

from .task import TASKS, Metric
from .token_stream import Split, TokenStream

BYTE_VALUES = 256
HELDOUT_FRACTION = 0.05
# Not the library itself: other people's packages, and tests (some hold generated or deliberately broken source).
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@TASKS.register
class ByteText(TokenStream):
    """Next-byte prediction over the text files of a folder, split by file into train and held-out."""

    class Config(PartConfig):
        type: Literal["text"] = "text"
        folder: str | None = Field(
            None,
            min_length=1,
            description="folder of text files; null = the source files of the Python standard library",
        )

    config: Config
    metric = Metric.bits_per("byte")
    other_data = (
        "training.task.folder: expected the text this run began with, got files with other content; "
        "restore the files, or start a new run"
    )

    def check(self) -> None:
        self.need_vocabulary(BYTE_VALUES, "one token a byte")

    def read(self) -> Split:
        return read_text(self.config.folder, window=self.seq_len + 1)

    def encode(self, text: bytes) -> list[int]:
        return list(text)

    def decode(self, tokens: list[int]) -> str:
        """Bytes that are not UTF-8 show as U+FFFD."""
        # A vocabulary may be larger; such tokens stand for no byte.
        return bytes(token for token in tokens if token < BYTE_VALUES).decode("utf-8", errors="replace")


def read_text(folder: str | None, *, window: int) -> Split:
    """Read and split a folder of text; None is the source of the Python standard library.

    Text is every file outside hidden folders that holds a byte and no NUL byte. Encodings do not matter.

    Raises:
        ValueError: there is no such folder, or its text does not fill one window of ``window`` bytes on each side.
    """
    root = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    if not root.is_dir():
        found = "which is a file" if root.exists() else "which does not exist"
        raise ValueError(
            f"training.task.folder: expected a folder of text files, got {str(root)!r}, {found}; "
            "name a folder, or leave it out to train on the Python standard library"
        )
    files = _library_files(root) if folder is None else _text_files(root)
    split = split_by_file(files, window=window)
    if min(len(split.train), len(split.heldout)) < window:
        raise ValueError(
            f"training.task.folder: expected at least {2 * window} bytes of text (a train and a held-out window of "
            f"seq_len + 1 = {window} bytes), got {sum(len(text) for _, text in files)} bytes in {len(files)} text "
            f"files in {str(root)!r}; name a folder with more text or lower training.seq_len"
        )
    return split


def split_by_file(files: Sequence[tuple[str, bytes]], *, window: int) -> Split:
    """Hold out the files whose path hashes lowest, one in twenty and at least one; ``files`` are (path, content).

    When that leaves less than a window on a side (one file, say), the text is cut inside a file instead.
    """
    ranked = [content for _, content in sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file[0])).digest())]
    num_heldout = max(1, round(HELDOUT_FRACTION * len(ranked)))
    heldout, train = b"".join(ranked[:num_heldout]), b"".join(ranked[num_heldout:])
    if min(len(heldout), len(train)) < window:
        whole = heldout + train
        cut = max(window, math.ceil(HELDOUT_FRACTION * len(whole)))
        heldout, train = whole[:cut], whole[cut:]
    return Split(_as_tensor(train), _as_tensor(heldout))


def _library_files(root: Path) -> list[tuple[str, bytes]]:
    paths = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    return [(path.as_posix(), (root / path).read_bytes()) for path in paths if not SKIPPED_FOLDERS & set(path.parts)]


def _text_files(root: Path) -> list[tuple[str, bytes]]:
    paths = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    files = [(path.as_posix(), (root / path).read_bytes()) for path in visible]
    return [(path, content) for path, content in files if content and b"\0" not in content]


def _as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8))
