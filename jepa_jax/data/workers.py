"""Worker processes that load batches, and what happens if one of them dies or gets stuck.

Worker i of n makes every n-th batch and hands it over in memory that has no name: nothing is left in /dev/shm however
the processes end, and its size does not matter. Pipes carry the rest: no killed process can keep a lock.
"""

import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection, reduction
from typing import Any

import cloudpickle
import numpy as np

from jepa_jax.base.errors import DataLost
from jepa_jax.data.batch_plan import BatchLoader, loaded_batches

POLL_SECONDS = 0.1
KILL_SECONDS = 5.0  # for the system to end a killed process; one that hangs in the kernel is left behind
RESTART_DISTANCE = 1000  # batches between two failures that are taken for independent
ALIGNMENT = 64  # bytes

Element = dict[str, Any]  # what BatchLoader returns


class WorkerPool(Iterator[Element]):
    """Yields what `loader` makes of `first_step` and all later steps, in order.

    If a worker dies, or delivers nothing for `timeout` seconds, all are started again, from the step that is missing:
    the batches are the same. If that does not help, DataLost names the worker.
    """

    def __init__(
        self, loader: BatchLoader, first_step: int, count: int, *, timeout: float, warn: Callable[[str], object]
    ):
        self._loader = cloudpickle.dumps(loader)  # also classes of a notebook
        self._first = self._step = first_step
        self._count, self.timeout, self._warn = count, timeout, warn
        self._workers: list[_Worker] = []
        self._restarted: int | None = None  # the step of the last restart
        self._closed = threading.Event()
        self._lock = threading.Lock()  # no worker starts after `close`

    def __next__(self) -> Element:
        while True:
            self._start()
            worker = self._workers[(self._step - self._first) % self._count]
            try:
                element = worker.receive(self.timeout, self._closed)
            except _Lost as lost:
                self._replace(worker, lost)
                continue
            self._step += 1
            return element

    def close(self) -> None:
        """Ends the workers, also stopped ones, and a `next` that waits in another thread; they have nothing to save."""
        self._closed.set()
        with self._lock:
            self._kill()

    def _start(self) -> None:
        with self._lock:
            if self._closed.is_set():
                raise StopIteration
            if not self._workers:
                self._first = self._step
                self._workers = [_Worker(i, self._count, self._loader, self._first) for i in range(self._count)]

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(KILL_SECONDS)
        self._workers = []  # a thread may still wait at the other ends of their pipes

    def _replace(self, worker: "_Worker", lost: "_Lost") -> None:
        """Ends all workers; raises DataLost if that was done shortly before."""
        if self._closed.is_set():
            return
        what = f"data worker {worker.index + 1} of {self._count} (pid {worker.process.pid}) {lost}"
        with self._lock:
            self._kill()
        if self._restarted is not None and self._step - self._restarted < RESTART_DISTANCE:
            raise DataLost(
                f"{what} at batch {self._step}, and so did one before the workers were restarted; {lost.fix}, or load "
                "in the main process with config.data.num_workers=0"
            )
        self._restarted = self._step
        self._warn(f"{what}; all workers are started again, from batch {self._step} on")


class _Lost(Exception):
    """A worker that will deliver nothing more; `fix` is what the user may do about it."""

    def __init__(self, what: str, fix: str):
        super().__init__(what)
        self.fix = fix


class _Worker:
    """One worker as the main process sees it."""

    def __init__(self, index: int, count: int, loader: bytes, first_step: int):
        context = multiprocessing.get_context("spawn")
        self.index = index
        self.connection, theirs = context.Pipe()
        self._memory = _Memory(_anonymous_file())
        arguments = (theirs, self._memory, loader, first_step + index, count)
        self.process = context.Process(target=_work, args=arguments, daemon=True, name=f"data-worker-{index}")
        self.process.start()
        theirs.close()  # so that the end of the worker ends the connection

    def receive(self, timeout: float, closed: threading.Event) -> Element:
        """Returns the worker's next batch, copied; raises what its loader raised, or _Lost."""
        waited = 0.0  # while this process runs: Ctrl-Z stops all of them
        while not self.connection.poll(POLL_SECONDS):
            waited += POLL_SECONDS
            if closed.is_set():
                raise _Lost("was closed", "")
            if waited > timeout:
                fix = "check what it reads (config.data.dir), allow more than config.data.worker_timeout"
                raise _Lost(f"delivered nothing for {timeout:g} s", fix)
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(message, BaseException):
            raise message
        arrays, rest = message
        batch = {key: self._memory.array(*place).copy() for key, place in arrays.items()}
        try:
            self.connection.send(None)  # the memory is free again
        except OSError:
            pass  # it died, which the next call finds out; this batch is whole
        return {"batch": batch, **rest}

    def _death(self) -> _Lost:
        self.process.join(KILL_SECONDS)
        code = self.process.exitcode
        fix = "if memory ran out, use fewer config.data.num_workers or a smaller config.data.batch_size"
        if code is None or code >= 0:
            return _Lost(f"ended with exit code {code}", fix)
        return _Lost(f"was ended by {signal.Signals(-code).name}", fix)


class _Memory:
    """Memory that two processes share through a file without a name; it grows to what is asked for."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    def array(self, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> np.ndarray:
        """Returns the array at an offset in bytes; it is only valid until the memory is used again."""
        end = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if self._mapped is None or len(self._mapped) < end:
            if os.fstat(self._descriptor).st_size < end:
                os.ftruncate(self._descriptor, end)
            self._mapped = mmap.mmap(self._descriptor, 0) if end else None
        return np.ndarray(shape, dtype, self._mapped, offset) if end else np.empty(shape, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited_memory, (reduction.DupFd(self._descriptor),)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._descriptor)


def _inherited_memory(duplicate: Any) -> _Memory:
    return _Memory(duplicate.detach())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("jepa_jax-batch", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# --- in the worker ---


def _work(pipe: connection.Connection, memory: _Memory, loader: bytes, first_step: int, stride: int) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):  # for the main process; a scheduler sends them to all at once
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()
    try:
        for number, element in enumerate(loaded_batches(cloudpickle.loads(loader), first_step, stride)):
            if number:
                pipe.recv()  # the batch before has been read
            pipe.send((_stored(element.pop("batch"), memory), element))
    except (EOFError, ConnectionError):
        return  # the main process has closed its end
    except BaseException as error:
        pipe.send(_sendable(error))


def _stored(batch: dict[str, np.ndarray], memory: _Memory) -> dict[str, tuple[tuple[int, ...], np.dtype, int]]:
    """Copies arrays into shared memory; returns where they are."""
    places, offset = {}, 0
    for key, array in batch.items():
        places[key] = (array.shape, array.dtype, offset)
        offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    for key, (shape, dtype, place) in reversed(places.items()):  # the last one first: the memory grows once
        np.copyto(memory.array(shape, dtype, place), batch[key], casting="no")
    return places


def _sendable(error: BaseException) -> BaseException:
    """Returns an error that survives pickling, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error))
    error.add_note(f"In a data worker:\n{trace}")
    try:
        reduction.ForkingPickler.loads(reduction.ForkingPickler.dumps(error))
    except Exception:  # an exception class may need other arguments than its message
        return RuntimeError(trace)
    return error


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one
    parent.join()
    os._exit(1)
