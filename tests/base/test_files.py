"""Small files: written whole or not at all, read strictly or tolerantly."""

import errno
import os
import pathlib
import pwd

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import (
    disk_reason,
    read_json,
    read_json_or_empty,
    read_toml,
    user_path,
    write_atomically,
    write_json,
)


def test_a_written_file_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": [2, 3]})
    assert read_json(path, "") == read_json_or_empty(path) == {"a": [2, 3]}
    assert [p.name for p in tmp_path.iterdir()] == ["value.json"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_json(tmp_path / "value.json", {})
    finally:
        os.umask(before)
    assert (tmp_path / "value.json").stat().st_mode & 0o777 == 0o666 & ~umask


def test_file_and_folder_are_synced_after_the_content_and_the_rename(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def record(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_atomically(tmp_path / "a.txt", b"content")
    assert synced[0].startswith(str(tmp_path / ".a.txt.")) and synced[1] == str(tmp_path)


def test_a_failed_write_keeps_the_old_file_and_names_it(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_atomically(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match="a.txt: the disk is full"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    "error, reason",
    [
        (OSError(errno.ENOSPC, "x"), "the disk is full"),
        (
            ValueError("RESOURCE_EXHAUSTED: write [OS error 28: No space left on device]"),
            "the disk is full",
        ),
        (UserError("a.txt: the disk is full; free space"), "the disk is full"),
        (OSError(errno.EDQUOT, "x"), "the disk is full"),
        (ValueError("OUT_OF_RANGE: [OS error 27: EFBIG File too large]"), "the file would be larger"),
        (OSError(errno.EFBIG, "x"), "the file would be larger"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes"), "memory is used up"),
        (MemoryError(), "memory is used up"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_the_reason_of_a_failed_write_is_named_in_the_right_words(error, reason):
    assert disk_reason(error).startswith(reason)


@pytest.mark.parametrize(
    "content, problem",
    [(None, "not found"), ("{", "not valid JSON"), ("[1]", "not a JSON object"), ("[" * 100_000, "not valid JSON")],
)
def test_json_that_cannot_be_read_is_refused_or_empty(tmp_path, content, problem):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=rf"x.json: {problem}.*; delete it"):
        read_json(path, "delete it")
    assert read_json_or_empty(path) == {}


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"\xff\xfe\x00")
    assert read_json_or_empty(path) == {} == read_json_or_empty(tmp_path)
    with pytest.raises(UserError, match="not TOML"):
        read_toml(path, str(path), "")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("~nosuchuser/x", "home directory"), ("x" * 300, "File name too long"), ("a\0b", "null"), ("~/x", "home")],
)
def test_paths_that_cannot_be_are_named_with_their_flag(monkeypatch, text, reason):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(UserError, match=rf"^--workdir = .*: not a path \(.*{reason}"):
        user_path(text, "--workdir")
    assert user_path("a/b", "--workdir") == pathlib.Path("a/b")
