"""How Orbax writes and reads checkpoints here.

A checkpoint carries checksums of all its files. They are written by the thread that saves, into the temporary folder
that Orbax then renames: whatever is called `step_N` is whole, or was damaged later, which a restore notices.
"""

import contextlib
import errno
import itertools
import logging
import pathlib
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jepa_jax.base.files import FULL, disk_reason, sync_folder
from jepa_jax.program.checksums import write_checksums
from jepa_jax.program.step import TrainState
from jepa_jax.runtime.peers import is_first

UNFINISHED = ocp.path.atomicity.TMP_DIR_SUFFIX  # in the names of folders that are being written


class ChecksummedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """The temporary folder of a checkpoint: before it gets its name, checksums are added and all is synced to disk.

    Orbax finalizes it in its background thread, on the first process, when all processes have written their parts.
    """

    async def finalize(self) -> None:
        final = self.get_final()
        if UNFINISHED in final.parent.name:  # a part of a checkpoint, whose checksums come with the whole of it
            return await super().finalize()
        unnamed = final.with_name(f"{final.name}{UNFINISHED}-checked")  # recognised as unfinished
        self._final_path = unnamed
        try:
            await super().finalize()  # changes files
        finally:
            self._final_path = final
        write_checksums(pathlib.Path(unnamed))
        unnamed.rename(final)
        sync_folder(pathlib.Path(final.parent))


class Meetings:
    """Where the background threads of several processes wait for each other during a save.

    All of them meet when the parts are written, and again after the checkpoint folder was renamed. Orbax lets a process
    that fails skip these barriers, and the others wait for it until a time limit; here it tells them that it failed.
    """

    NAMES = ("async_write_complete", "async_commit_complete")  # in the order in which Orbax holds them
    _saves = itertools.count()  # the same on all processes: they save together

    def begin(self) -> None:
        """Prepares for the next save; all processes have ended the one before."""
        self._prefix, self._left = f"jepa_jax/save/{next(self._saves)}", list(self.NAMES)
        self._starter = threading.get_ident()

    def end(self) -> None:
        """Forgets what was said; call it when no process is saving any more."""
        if jax.process_count() > 1 and is_first():
            ocp.multihost.get_jax_distributed_client().key_value_delete(f"{self._prefix}/")

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits at the barrier of Orbax with this name; raises OSError if another process has failed."""
        name = next((name for name in self.NAMES if name in key), None)
        if name is not None:
            return self._meet(name, timeout_ms)
        # Orbax holds others before and after a save. A thread that has failed comes to the latter without those above.
        raised = sys.exc_info()[1]
        if isinstance(raised, Exception) and threading.get_ident() != self._starter:
            while self._left:
                self._say(self._left[0], disk_reason(raised))
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _meet(self, name: str, timeout_ms: int) -> None:
        self._say(name, "")
        client = ocp.multihost.get_jax_distributed_client()
        for process in range(jax.process_count()):
            reason = client.blocking_key_value_get(f"{self._prefix}/{name}/{process}", timeout_ms)[1:]
            if reason:
                raise OSError(errno.ENOSPC if reason == FULL else errno.EIO, reason)

    def _say(self, name: str, reason: str) -> None:
        self._left.remove(name)
        client = ocp.multihost.get_jax_distributed_client()
        client.key_value_set(f"{self._prefix}/{name}/{jax.process_index()}", f":{reason}")  # not "", which it refuses


def open_manager(directory: pathlib.Path, keep: int, meetings: Meetings) -> ocp.CheckpointManager:
    """Returns what writes checkpoints in the background, and keeps the newest of them."""
    several = jax.process_count() > 1
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(keep),
        enable_async_checkpointing=True,
        # In the background, a folder that cannot be made would be waited for, for minutes.
        async_options=ocp.options.AsyncOptions(
            create_directories_asynchronously=False, barrier_sync_fn=meetings if several else None
        ),
        step_prefix="step",
        temporary_path_class=ChecksummedPath,
    )
    # Compression takes the cores of the steps meanwhile, and trained numbers shrink by a few per cent.
    handlers = {
        "state": ocp.PyTreeCheckpointHandler(use_compression=False),
        "progress": ocp.JsonCheckpointHandler(),
        "evaluated_stats": ocp.PyTreeCheckpointHandler(use_compression=False),
    }
    return ocp.CheckpointManager(directory.resolve(), options=options, item_handlers=handlers)


def open_reader() -> ocp.Checkpointer:
    """Returns what reads a checkpoint; unlike a manager, it does not mind others that are damaged."""
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            state=ocp.StandardCheckpointHandler(),
            progress=ocp.JsonCheckpointHandler(),
            evaluated_stats=ocp.StandardCheckpointHandler(),
        )
    )


def set_apart(state: TrainState) -> TrainState:
    """Returns the state, on CPUs a copy of it.

    There Orbax writes from the arrays themselves. The next step, which is given them to overwrite, would have to copy
    them first, and it would do so while the threads that write keep the cores busy.
    """
    if jax.default_backend() != "cpu":
        return state
    return jax.block_until_ready(jax.tree.map(jnp.copy, state))


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Returns whether a log record is not about Orbax."""
    raised = traceback.format_exception(*record.exc_info) if record.exc_info else []
    return "orbax" not in "".join([record.pathname, record.getMessage(), *raised])


@contextlib.contextmanager
def quiet_about_failed_saves() -> Iterator[None]:
    """Hides the tracebacks of failed saves; what failed is told by an exception, once.

    They are logged by Orbax, and by asyncio for Orbax, and raised in threads that TensorStore lets report to a save
    which has failed already.
    """
    show, loggers = sys.unraisablehook, [logging.getLogger(name) for name in ("absl", "asyncio")]

    def hide(record: logging.LogRecord) -> bool:  # one per block: blocks may be nested
        return _is_not_of_orbax(record)

    def show_others(raised: Any) -> None:
        if not (isinstance(raised.exc_value, RuntimeError) and str(raised.exc_value) == "Event loop is closed"):
            show(raised)

    sys.unraisablehook = show_others
    for logger in loggers:
        logger.addFilter(hide)
    try:
        yield
    finally:
        sys.unraisablehook = show
        for logger in loggers:
            logger.removeFilter(hide)
