"""Reading and writing small files: whole or not at all, with errors that name the file and the fix."""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import secrets
import tomllib
from collections.abc import Collection
from typing import Any

from jepa_jax.base.errors import UserError

FULL = "the disk is full"
FULL_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
TOO_LARGE = "the file would be larger than `ulimit -f` or the file system allows"


def user_path(text: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Returns a path that a user gave, with ~ replaced; UserError, which calls it `name`, for one that cannot be."""
    try:
        path = pathlib.Path(text).expanduser()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # whoever uses it knows what that means
    except (RuntimeError, ValueError, OSError) as error:  # no home, a null byte, too long a name, a loop of links
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{name} = {os.fspath(text)!r}: not a path ({reason}); give another one") from None
    return path


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replaces a file in one step and returns when it is on disk: readers see the old or the new content, never a part.

    Raises UserError if the disk is full, read-only or missing; nothing is left behind.
    """
    path = pathlib.Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:  # with the permissions that the umask leaves
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise disk_error(error, path) from error
    sync_folder(path.parent)


def remove_leftovers(folder: pathlib.Path, names: Collection[str] = ()) -> None:
    """Removes what processes that were killed in `write_atomically` left: of these files, or of all in the folder."""
    for path in folder.glob(".*.*"):
        found = re.fullmatch(r"\.(.+)\.[a-z0-9_]{8}", path.name)  # earlier versions used more letters
        if found and (not names or found[1] in names):
            with contextlib.suppress(OSError):
                path.unlink()


class AppendedFile:
    """A file that grows by whole entries: one that cannot be written leaves nothing behind."""

    def __init__(self, path: pathlib.Path):
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise disk_error(error, path) from error

    def append(self, entry: bytes) -> None:
        """Adds an entry; raises OSError if the disk is full or broken."""
        before, left = self._file.seek(0, os.SEEK_END), memoryview(entry)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise

    def close(self) -> None:
        self._file.close()


def file_digest(path: pathlib.Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def make_folder(path: pathlib.Path) -> None:
    """Makes a folder and those above it; raises UserError if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path) from error


def sync_folder(folder: pathlib.Path) -> None:
    """Flushes the rename itself; does nothing where the system cannot sync folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def read_json(path: str | os.PathLike[str], fix: str) -> dict[str, Any]:
    """Returns the JSON object in a file; raises UserError with `fix`, e.g. "delete it", if there is none."""
    try:
        value = json.loads(pathlib.Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: not found; {fix}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {fix}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); {fix}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; {fix}")
    return value


def read_json_or_empty(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the JSON object in a file, or {} if the file is missing or does not hold one."""
    try:
        return read_json(path, "")
    except UserError:
        return {}


def read_toml(path: pathlib.Path, name: str, fix: str) -> dict[str, Any]:
    """Returns the content of a TOML file, as `read_json` does; `name` is what errors call it, such as its flag."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror}); {fix}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: not TOML ({error}); fix the file") from error


def disk_error(error: Exception, path: str | os.PathLike[str]) -> UserError:
    """Returns the error to raise for a disk that is full, read-only or missing."""
    if (reason := disk_reason(error)) == FULL:
        return UserError(f"{path}: {FULL}; free space and start the same command again: it resumes")
    return UserError(f"{path}: cannot write ({reason}); choose another place")


def disk_reason(error: Exception) -> str:
    """Returns in a few words why something could not be written; FULL for a full disk, whoever reports it."""
    text, number = str(error), getattr(error, "errno", None)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in text):
        return "memory is used up"
    # TensorStore and our own errors have no number, but the words of the system.
    if number in FULL_NUMBERS or any(word in text for word in (*map(os.strerror, FULL_NUMBERS), FULL)):
        return FULL
    if number == errno.EFBIG or os.strerror(errno.EFBIG) in text or TOO_LARGE in text:
        return TOO_LARGE
    return str(getattr(error, "strerror", None) or error)
