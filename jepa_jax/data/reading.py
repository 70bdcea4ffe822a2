"""Reads that may hang: data on a server that does not answer must not keep a run from hearing signals and saving."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from jepa_jax.base.errors import DataLost
from jepa_jax.base.text import first_of

POLL_SECONDS = 0.1

Read = Callable[[], dict[str, Any]]  # returns arrays, and under "skipped" the names of unreadable files if any

_under_way: dict[int, Callable[[], str]] = {}  # by thread: what returns the name of the file that it reads


@contextlib.contextmanager
def reading(name: Callable[[], str]) -> Iterator[None]:
    """Lets `took_too_long` name what is read inside the block."""
    thread = threading.get_ident()
    _under_way[thread] = name
    try:
        yield
    finally:
        _under_way.pop(thread, None)


def took_too_long(seconds: float) -> DataLost:
    """Returns the error to raise when data are not there after so long; it names the files being read, if known."""
    names = sorted({name() for name in list(_under_way.values())})
    what = first_of(names, 1) or "config.data.dir"
    return DataLost(
        f"{what}: not read within {seconds:g} s; check the disk or the server that it is on, or allow more by "
        "config.data.worker_timeout"
    )


class PatientReader:
    """Calls functions that read in threads, which are left behind if they hang.

    Args:
      timeout: seconds after which a read is given up: DataLost is raised.
      check: called again and again during a read; may raise.
      together: whether all reads together have these seconds, from now on.
    """

    def __init__(self, timeout: float, check: Callable[[], object] = lambda: None, *, together: bool = False):
        self._timeout, self._check = timeout, check
        self._end = time.monotonic() + timeout if together else math.inf

    def __call__(self, read: Read) -> dict[str, Any]:
        """Returns what `read` returns, or raises what it raises."""
        future: Future[dict[str, Any]] = Future()
        threading.Thread(target=_fulfil, args=(future, read), name="read", daemon=True).start()
        waited = 0.0  # while this process runs: Ctrl-Z stops it
        while waited < self._timeout and time.monotonic() < self._end:
            done, _ = wait([future], POLL_SECONDS)
            if done:
                return future.result()
            waited += POLL_SECONDS
            self._check()
        raise took_too_long(self._timeout)


def _fulfil(future: "Future[dict[str, Any]]", read: Read) -> None:
    try:
        future.set_result(read())
    except BaseException as error:
        future.set_exception(error)
