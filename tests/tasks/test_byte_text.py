"""The text task: what is read, and how it is split."""

import shutil
from pathlib import Path

import pytest
import torch

from statemix.tasks import ByteText
from statemix.tasks.byte_text import read_text, split_by_file

FILES = [(f"folder/file{number}.py", bytes([number % 251]) * (100 + number)) for number in range(200)]


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


def test_the_fingerprint_is_that_of_the_text(tmp_path: Path) -> None:
    def fingerprint(name: str) -> str:
        config = ByteText.Config(folder=str(tmp_path / name))
        return ByteText(config, vocab_size=256, seq_len=17, seed=0).fingerprint()

    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"part{number:02d}.txt").write_text(f"file {number} says {number * number} and more. " * 9)
    shutil.copytree(tmp_path / "text", tmp_path / "copy")
    before = fingerprint("text")
    assert fingerprint("copy") == before
    (tmp_path / "copy" / "part00.txt").write_text("changed " * 40)
    assert fingerprint("copy") != before


def test_a_prompt_is_its_bytes_and_tokens_that_are_no_byte_stand_for_nothing() -> None:
    task = ByteText(ByteText.Config(), vocab_size=300, seq_len=17, seed=0)
    assert task.encode("a\u00e9".encode()) == [97, 195, 169]
    assert task.decode([97, 299, 195, 169, 195]) == "a\u00e9\ufffd"
