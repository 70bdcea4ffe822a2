"""Writes checkpoints in the background, with checksums; several processes write one together."""

import concurrent.futures
import contextlib
import errno
import itertools
import logging
import pathlib
import shutil
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from jepa_jax.base.files import FULL, disk_reason, sync_folder
from jepa_jax.program.checksums import MARK, step_folders, write_checksums
from jepa_jax.runtime.peers import is_first

UNFINISHED = ocp.path.atomicity.TMP_DIR_SUFFIX  # in the names of folders that are being written or removed


class CheckpointWriter:
    """Writes checkpoints, one at a time, and keeps the newest `keep` of those in the same folder.

    Orbax writes under an unfinished name. A thread then adds checksums, syncs all of it to disk and renames the folder:
    whatever is called `step_N` is whole, or was damaged later, which a restore notices.
    """

    def __init__(self, keep: int):
        self._keep, self._meetings = keep, Meetings()
        # Compression takes the cores of the steps meanwhile, and trained numbers shrink by a few per cent.
        arrays = {name: ocp.PyTreeCheckpointHandler(use_compression=False) for name in ("state", "evaluated_stats")}
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(**arrays, progress=ocp.JsonCheckpointHandler()),
            # In the background, a folder that cannot be made would be waited for, for minutes.
            async_options=ocp.options.AsyncOptions(
                create_directories_asynchronously=False,
                barrier_sync_fn=self._meetings.meet if jax.process_count() > 1 else None,
            ),
        )
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._written: concurrent.futures.Future[None] | None = None

    def start(self, folder: pathlib.Path, items: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Copies the items of a checkpoint (arguments of Orbax by name) and returns; call `wait` before the next."""
        self._meetings.begin()
        unfinished = folder.with_name(f"{folder.name}{UNFINISHED}-unchecked").resolve()
        self._orbax.save(unfinished, args=ocp.args.Composite(**items), custom_metadata=MARK | manifest)
        self._written = self._thread.submit(self._finish, unfinished, folder)

    def _finish(self, unfinished: pathlib.Path, folder: pathlib.Path) -> None:
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            self._meetings.tell(disk_reason(error))
            raise
        if not is_first():
            return
        write_checksums(unfinished)
        unfinished.rename(folder)
        sync_folder(folder.parent)
        newest_first = [path for _, path in step_folders(folder.parent)]
        for old in newest_first[newest_first.index(folder) + self._keep :]:
            shutil.rmtree(old.rename(f"{old}{UNFINISHED}-old"), ignore_errors=True)

    def is_writing(self) -> bool:
        """Returns whether this process has not ended its last write."""
        return self._written is not None and not self._written.done()

    def wait(self) -> None:
        """Waits until this process writes nothing; raises why it could not."""
        if self._written is not None:
            self._written.result()

    def end(self) -> None:
        """Forgets the last write; call it when no process is writing any more."""
        self._written = None
        self._meetings.end()

    def close(self) -> None:
        self._thread.shutdown()
        self._orbax.close()


class Meetings:
    """Where the background threads of several processes wait for each other during a save.

    All of them meet when the arrays are written, and again after the first one has joined them. Orbax lets a process
    that fails skip these barriers, and the others would wait for it until a time limit; here it tells them.
    """

    NAMES = ("async_write_complete", "async_commit_complete")  # in the order in which Orbax holds them
    _saves = itertools.count()  # the same on all processes: they save together

    def begin(self) -> None:
        """Prepares for the next save; all processes have ended the one before."""
        self._prefix, self._left = f"jepa_jax/save/{next(self._saves)}", list(self.NAMES)

    def end(self) -> None:
        """Forgets what was said; call it when no process is saving any more."""
        if jax.process_count() > 1 and is_first():
            ocp.multihost.get_jax_distributed_client().key_value_delete(f"{self._prefix}/")

    def meet(self, *, key: str, timeout_ms: int) -> None:
        """Waits at the barrier of Orbax with this name; raises OSError if another process has failed."""
        name = next(name for name in self._left if name in key)
        self._say(name, "")
        client = ocp.multihost.get_jax_distributed_client()
        for process in range(jax.process_count()):
            reason = client.blocking_key_value_get(f"{self._prefix}/{name}/{process}", timeout_ms)[1:]
            if reason:
                raise OSError(errno.ENOSPC if reason == FULL else errno.EIO, reason)

    def tell(self, reason: str) -> None:
        """Tells the others that this process will not come."""
        while self._left and jax.process_count() > 1:
            self._say(self._left[0], reason)

    def _say(self, name: str, reason: str) -> None:
        self._left.remove(name)
        client = ocp.multihost.get_jax_distributed_client()
        client.key_value_set(f"{self._prefix}/{name}/{jax.process_index()}", f":{reason}")  # not "", which it refuses


@contextlib.contextmanager
def quiet_about_failed_saves() -> Iterator[None]:
    """Hides the tracebacks of failed saves; what failed is told by an exception, once.

    They are logged by Orbax, and by asyncio for Orbax, and raised in threads that TensorStore lets report to a save
    which has failed already.
    """
    show, loggers = sys.unraisablehook, [logging.getLogger(name) for name in ("absl", "asyncio")]

    def is_not_of_orbax(record: logging.LogRecord) -> bool:
        raised = traceback.format_exception(*record.exc_info) if record.exc_info else []
        return "orbax" not in "".join([record.pathname, record.getMessage(), *raised])

    def show_others(raised: Any) -> None:
        if not (isinstance(raised.exc_value, RuntimeError) and str(raised.exc_value) == "Event loop is closed"):
            show(raised)

    sys.unraisablehook = show_others
    for logger in loggers:
        logger.addFilter(is_not_of_orbax)
    try:
        yield
    finally:
        sys.unraisablehook = show
        for logger in loggers:
            logger.removeFilter(is_not_of_orbax)
