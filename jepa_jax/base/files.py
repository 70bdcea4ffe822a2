"""Files that are either whole or not there, and what to say when a disk refuses."""

import errno
import json
import os
import pathlib
import tempfile
import tomllib
from typing import Any

from jepa_jax.base.errors import UserError


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes beside the file and renames: a reader sees the old content or the new one, never a part."""
    path = pathlib.Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise disk_error(error, path) from error


def write_json(path: str | os.PathLike, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def read_toml(path: pathlib.Path, name: str, fix: str) -> dict[str, Any]:
    """The content of a user's file; `name` and `fix` are for the message if it cannot be read."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror}); {fix}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name}: not TOML ({error}); fix the file") from error


def disk_error(error: Exception, path: str | os.PathLike) -> UserError:
    """The message for a full, read-only or missing disk."""
    full = ("No space left", "RESOURCE_EXHAUSTED", "OUT_OF_RANGE", "File too large")
    if getattr(error, "errno", None) == errno.ENOSPC or any(words in str(error) for words in full):
        return UserError(f"{path}: the disk is full; free space and start the same command again: it resumes")
    return UserError(f"{path}: cannot write ({getattr(error, 'strerror', None) or error}); choose another place")
