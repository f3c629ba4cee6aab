"""The text task: what is read, how it is split, which windows are drawn."""

import shutil
from pathlib import Path

import pytest
import torch

from statemix.training.byte_text import ByteText, TextSplit, read_text, split_by_file

FILES = [(f"folder/file{number}.py", bytes([number % 251]) * (100 + number)) for number in range(200)]


def windows_of(split: TextSplit, *, seq_len: int = 17) -> ByteText:
    return ByteText(split, seq_len=seq_len, seed=0)


def test_one_file_in_twenty_is_held_out_and_no_file_is_on_both_sides() -> None:
    split = split_by_file(FILES, window=18)
    train, heldout = set(split.train.tolist()), set(split.heldout.tolist())
    assert len(heldout) == 10
    assert not train & heldout
    assert len(split.train) + len(split.heldout) == sum(len(content) for _, content in FILES)


def test_the_split_does_not_depend_on_the_order_in_which_files_are_found() -> None:
    forward, backward = split_by_file(FILES, window=18), split_by_file(FILES[::-1], window=18)
    assert torch.equal(forward.train, backward.train)
    assert torch.equal(forward.heldout, backward.heldout)


def test_one_file_alone_is_cut_in_two() -> None:
    split = split_by_file([("only.txt", bytes(range(200)) * 10)], window=65)
    assert len(split.heldout) == 100  # one twentieth of 2000
    assert len(split.train) == 1900


def test_labels_are_the_next_bytes() -> None:
    task = windows_of(TextSplit(torch.arange(200, dtype=torch.uint8), torch.arange(200, dtype=torch.uint8)))
    for batch in (task.train_batch(1, 5), *task.heldout_batches(2, 3)):
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        assert torch.equal(batch.labels, batch.tokens + 1)


def test_every_window_of_the_text_can_be_drawn_and_none_beyond_it() -> None:
    task = windows_of(TextSplit(torch.arange(21, dtype=torch.uint8), torch.zeros(18, dtype=torch.uint8)))
    starts = task.train_batch(1, 500).tokens[:, 0].unique().tolist()
    assert starts == [0, 1, 2, 3]  # 21 bytes hold 4 windows of 17 + 1


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    split = split_by_file(FILES, window=18)
    task = windows_of(split)
    first = task.train_batch(4, 3)
    task.train_batch(5, 3)
    torch.manual_seed(99)
    assert torch.equal(first.tokens, windows_of(split).train_batch(4, 3).tokens)
    assert not torch.equal(first.tokens, task.train_batch(5, 3).tokens)
    assert not torch.equal(first.tokens, ByteText(split, seq_len=17, seed=1).train_batch(4, 3).tokens)


@pytest.mark.parametrize("num_bytes", [18, 34, 35, 36, 1000])  # one window; just below, at and above two; many
def test_heldout_windows_do_not_overlap_and_reach_both_ends(num_bytes: int) -> None:
    text = (torch.arange(num_bytes) % 256).to(torch.uint8)
    batches = list(windows_of(TextSplit(text, text)).heldout_batches(4, 3))
    first_labels = torch.cat([batch.labels[:, 0] for batch in batches])
    assert len(first_labels) == min(12, (num_bytes - 1) // 17)
    gaps = first_labels.diff() % 256
    assert bool((gaps >= 17).all())
    if len(first_labels) > 1:
        assert int(batches[-1].labels[-1, -1]) == (num_bytes - 1) % 256


def test_the_library_is_read_without_its_tests_and_without_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "json/decoder.py",
        "test/test_json.py",
        "site-packages/torch/nn.py",
        "idlelib/idle_test/a.py",
        "notes.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name[:1].encode() * 1000)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    split = read_text(None, window=18)
    assert set(split.train.tolist()) | set(split.heldout.tolist()) == {ord("j")}


def test_the_standard_library_of_this_python_is_megabytes_of_source() -> None:
    split = read_text(None, window=257)
    assert len(split.train) > 4_000_000
    assert 0.01 < len(split.heldout) / len(split.train) < 0.15  # one file in twenty, and files differ in size


def test_hidden_files_and_files_with_a_nul_byte_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 500)
    (tmp_path / "latin.txt").write_bytes(b"\xe9" * 500)  # not UTF-8, still text
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"g" * 500)
    split = read_text(str(tmp_path), window=18)
    assert set(split.train.tolist()) | set(split.heldout.tolist()) == {ord("a"), 0xE9}


def test_a_folder_without_text_is_refused_by_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("brief")
    (tmp_path / "file.txt").write_text("text " * 100)
    for name, got in (
        ("missing", "does not exist"),
        ("empty", "0 bytes"),
        ("short", "5 bytes"),
        ("file.txt", "is a file"),
    ):
        with pytest.raises(ValueError, match=rf"task\.folder: expected .*{name}") as error:
            read_text(str(tmp_path / name), window=18)
        assert got in str(error.value)


def test_the_fingerprint_is_that_of_the_text(text_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(text_folder, tmp_path / "copy")
    before = windows_of(read_text(str(text_folder), window=18)).fingerprint()
    assert windows_of(read_text(str(copy), window=18)).fingerprint() == before
    (copy / "part00.txt").write_text("changed " * 40)
    assert windows_of(read_text(str(copy), window=18)).fingerprint() != before
