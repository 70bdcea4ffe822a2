"""Reading files that may be damaged or hostile: no file blocks, and none takes more memory than there is."""

import os
import pathlib
import stat
from typing import BinaryIO

from jepa_jax.base.errors import UserError
from jepa_jax.runtime.memory import free_bytes


def open_regular(file: pathlib.Path) -> BinaryIO:
    """Opens a file for reading; raises UserError if it cannot be read or is a pipe, device or folder."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); check the file and its permissions") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{file}: not a regular file; remove it or put the file there")
    return os.fdopen(descriptor, "rb")


def check_fits(num_bytes: int, file: pathlib.Path) -> None:
    """Raises UserError if so much of a file does not fit into the memory that is free."""
    free = free_bytes()
    if num_bytes > free:
        raise UserError(
            f"{file}: its content takes {num_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of memory are free; use "
            "a part of it, or a machine with more memory"
        )
