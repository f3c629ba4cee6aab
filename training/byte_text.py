"""Byte-level text: next-byte prediction over a folder, split by file into train and held-out.

A file's side is decided by a hash of its path inside the folder, so it is the same on every machine with the same
files. Training windows start anywhere in the train text; held-out windows are fixed and evenly spaced. The score is
bits per byte: mean negative log2 probability of the next byte.

Shapes: B batch, T seq_len. A window is T + 1 bytes: T tokens and, one further, their T labels.
"""

import hashlib
import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .batch import Batch, generator_for

HELDOUT_FRACTION = 0.05
# Not the library itself: other people's packages, and tests (some hold generated or deliberately broken source).
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class TextSplit(NamedTuple):
    """Two texts without a byte in common, uint8 [num_bytes] each."""

    train: Tensor
    heldout: Tensor


class ByteText:
    """The text task: ``train_batch`` by step, fixed ``heldout_batches``."""

    metric = "bits_per_byte"

    def __init__(self, text: TextSplit, *, seq_len: int, seed: int) -> None:
        self.text = text
        self.seq_len = seq_len
        self.seed = seed

    def train_batch(self, step: int, batch_size: int) -> Batch:
        """The batch of one step: ``batch_size`` windows that start anywhere in the train text."""
        generator = generator_for(self.seed, "train", step)
        starts = torch.randint(len(self.text.train) - self.seq_len, (batch_size,), generator=generator)
        return self._windows(self.text.train, starts)

    def heldout_batches(self, num_batches: int, batch_size: int) -> Iterator[Batch]:
        """Evenly spaced windows that do not overlap; fewer than asked for when the text is short."""
        last_start = len(self.text.heldout) - self.seq_len - 1
        count = min(num_batches * batch_size, 1 + last_start // self.seq_len)
        starts = torch.tensor([index * last_start // max(count - 1, 1) for index in range(count)])
        for chosen in starts.split(batch_size):
            yield self._windows(self.text.heldout, chosen)

    def fingerprint(self) -> str:
        """Hash of both texts: equal fingerprints mean equal batches."""
        digest = hashlib.sha256(self.text.train.numpy().data)
        digest.update(self.text.heldout.numpy().data)
        return digest.hexdigest()

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        windows = text[starts[:, None] + torch.arange(self.seq_len + 1)].long()
        return Batch(windows[:, :-1], windows[:, 1:])


def read_text(folder: str | None, *, window: int) -> TextSplit:
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


def split_by_file(files: Sequence[tuple[str, bytes]], *, window: int) -> TextSplit:
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
    return TextSplit(_as_tensor(train), _as_tensor(heldout))


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
