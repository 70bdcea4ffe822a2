"""Reading files that may be damaged or hostile: no file blocks, and none takes more memory than there is."""

import os
import pathlib
import stat
from typing import BinaryIO

from jepa_jax.base.errors import UserError

# The most that any reader makes of a file, whatever the file claims.
MOST_VALUES = 4 * 178_956_970  # of a decoded image, height * width * channels; Pillow takes a quarter as many pixels
VALUES_PER_BYTE = 40_000  # of a decoded image, for each byte of its file: more than any format packs into one
VALUES_ALWAYS = 2**26  # of a decoded image, however small its file is
FILE_BYTES = 2**31  # of the file of an image
MOST_CLASSES = 1_000_000  # that labels may count


def open_regular(file: pathlib.Path) -> BinaryIO:
    """Opens a file for reading; raises UserError if it cannot be read or is a pipe, device or folder."""
    try:
        return _opened(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); check the file and its permissions") from error
    except ValueError as error:
        raise UserError(f"{file}: {error}; remove it or put the file there") from error


def _opened(file: str | os.PathLike[str]) -> BinaryIO:
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("not a regular file")
    return os.fdopen(descriptor, "rb")


def read_image_file(file: str | os.PathLike[str]) -> bytes:
    """Returns the content of an image file; raises OSError, or ValueError if it is no file or too large."""
    with _opened(file) as stream:
        check_file_bytes(os.fstat(stream.fileno()).st_size)
        return stream.read()


def check_file_bytes(size: int) -> None:
    if size > FILE_BYTES:
        raise ValueError(f"{size:,} bytes, at most {FILE_BYTES:,} are read")


def check_values(values: int, file_bytes: int) -> None:
    """Raises ValueError if a decoded image has more values than the budget allows for a file of this size."""
    most = min(MOST_VALUES, max(VALUES_ALWAYS, file_bytes * VALUES_PER_BYTE))
    if values > most:
        raise ValueError(f"claims {values:,} values in {file_bytes:,} bytes; at most {most:,} are decoded")


def check_classes(highest: int, where: object) -> None:
    """Raises UserError if labels go up to a number that cannot be that of a class."""
    if highest >= MOST_CLASSES:
        raise UserError(
            f"{where}: labels go up to {highest}, and at most {MOST_CLASSES:,} classes are possible; number the "
            "classes from 0 on without gaps"
        )


def check_fits(num_bytes: int, file: pathlib.Path) -> None:
    """Raises UserError if so much of a file does not fit into the memory that is free."""
    from jepa_jax.runtime.memory import free_bytes  # imports psutil: no worker that reads photographs needs it

    free = free_bytes()
    if num_bytes > free:
        raise UserError(
            f"{file}: its content takes {num_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of memory are free; use "
            "a part of it, or a machine with more memory"
        )
