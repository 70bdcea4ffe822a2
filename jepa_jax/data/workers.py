"""Worker processes that make the elements of a Grain dataset, and what happens if one of them dies or gets stuck.

Worker i of n makes every n-th element and hands it over in memory that has no name: nothing is left in /dev/shm however
the processes end, and its size does not matter. Pipes carry the rest: no killed process can keep a lock.
"""

import logging
import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection, reduction
from typing import Any

import cloudpickle
import grain
import jax
import numpy as np

from jepa_jax.base.errors import DataLost

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
KILL_SECONDS = 3.0  # for the system to end killed processes; those that hang in the kernel are left behind
RESTART_DISTANCE = 1000  # elements between two failures that are taken for independent
ALIGNMENT = 64  # bytes

State = dict[str, Any] | None  # the position of a Grain iterator; None = the start


class SupervisedPool(grain.IterDataset):
    """Makes the elements of a dataset in worker processes, in order.

    If a worker dies, or delivers nothing for `timeout` seconds, all are started again, from the element that is
    missing: the elements are the same. If that does not help, DataLost names the worker. Elements are trees of arrays
    and of anything that can be pickled.

    Args:
      parent: its elements are made by `workers` processes if it has random access, or else by one.
      threads: elements that each process makes at once, if there is random access.
      warn: called with what happened to a worker.
    """

    def __init__(
        self,
        parent: grain.MapDataset | grain.IterDataset,
        workers: int,
        *,
        threads: int = 1,
        timeout: float = 300.0,
        warn: Callable[[str], object] = logger.warning,
    ):
        super().__init__(parent)
        self._count = workers if isinstance(parent, grain.MapDataset) else 1
        self._threads, self._timeout, self._warn = threads, timeout, warn

    def __iter__(self) -> "PoolIterator":
        return PoolIterator(self._parent, self._count, self._threads, self._timeout, self._warn)

    def __str__(self) -> str:
        return f"SupervisedPool(workers={self._count}, threads={self._threads}, timeout={self._timeout:g})"


class PoolIterator(grain.DatasetIterator):
    """Iterates over what the workers make; they start with the first element that is asked for."""

    def __init__(self, parent: Any, count: int, threads: int, timeout: float, warn: Callable[[str], object]):
        super().__init__()
        self._dataset = cloudpickle.dumps(parent)  # also classes of a notebook
        self._state: State = {"next_index": 0} if isinstance(parent, grain.MapDataset) else None
        self._count, self._threads, self.timeout, self._warn = count, threads, timeout, warn
        self.seconds = 0.0
        self._workers: list[_Worker] = []
        self._taken = 0  # elements, all in all
        self._first = 0  # of them, before the workers were started
        self._restarted: int | None = None  # how many were taken at the last restart
        self._ended = threading.Event()
        self._lock = threading.Lock()  # no worker starts after `close`

    def __next__(self) -> Any:
        while True:
            self._start()
            worker = self._workers[(self._taken - self._first) % self._count]
            try:
                message = worker.receive(self.timeout, self._ended)
            except _Lost as lost:
                self._replace(worker, lost)
                continue
            if message is None:
                raise StopIteration
            element, self._state, self.seconds = message
            self._taken += 1
            if element is not None:  # Grain's mark of one that was filtered out
                return element

    def get_state(self) -> State:
        return self._state

    def set_state(self, state: State) -> None:
        with self._lock:
            self._kill()
            self._state = state

    def close(self) -> None:
        """Ends the workers, also stopped ones, and a `next` that waits in another thread; they have nothing to save."""
        if hasattr(self, "_ended"):
            self._ended.set()
            with self._lock:
                self._kill()

    def _start(self) -> None:
        with self._lock:
            if self._ended.is_set():
                raise StopIteration
            if not self._workers:
                self._first = self._taken
                share = (self._dataset, self._state, self._count, self._threads)
                self._workers = [_Worker(index, *share) for index in range(self._count)]

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        deadline = time.monotonic() + KILL_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        self._workers = []  # a thread may still wait at the other ends of their pipes

    def _replace(self, worker: "_Worker", lost: "_Lost") -> None:
        """Ends all workers; raises DataLost if that was done shortly before."""
        if self._ended.is_set():
            return
        what = f"data worker {worker.index + 1} of {self._count} (pid {worker.process.pid}) {lost}"
        place = (self._state or {}).get("next_index", self._taken)
        with self._lock:
            self._kill()
        if self._restarted is not None and self._taken - self._restarted < RESTART_DISTANCE:
            raise DataLost(
                f"{what} at batch {place}, and so did one before the workers were restarted; {lost.fix}, or load in "
                "the main process with config.data.num_workers=0"
            )
        self._restarted = self._taken
        self._warn(f"{what}; all workers are started again, from batch {place} on")


class _Lost(Exception):
    """A worker that will deliver nothing more; `fix` is what the user may do about it."""

    def __init__(self, what: str, fix: str):
        super().__init__(what)
        self.fix = fix


class _Worker:
    def __init__(self, index: int, dataset: bytes, state: State, count: int, threads: int):
        context = multiprocessing.get_context("spawn")
        self.index = index
        self.connection, theirs = context.Pipe()
        self._memory = _Memory()
        arguments = (theirs, self._memory, dataset, state, index, count, threads)
        self.process = context.Process(target=_work, args=arguments, daemon=True, name=f"data-worker-{index}")
        self.process.start()
        theirs.close()  # so that the end of the worker ends the connection

    def receive(self, timeout: float, ended: threading.Event) -> tuple[Any, State, float] | None:
        """Returns the worker's next element, copied, the state after it and the seconds it took; None at the end."""
        waited = 0.0  # while this process runs: Ctrl-Z stops all of them
        while not self.connection.poll(POLL_SECONDS):
            waited += POLL_SECONDS
            if ended.is_set():
                raise _Lost("was closed", "")
            if waited > timeout:
                fix = "check what it reads (config.data.dir), allow more than config.data.worker_timeout"
                raise _Lost(f"delivered nothing for {timeout:g} s", fix)
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(KILL_SECONDS)
            code = self.process.exitcode
            end = f"was ended by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
            fix = "if memory ran out, use fewer config.data.num_workers or a smaller config.data.batch_size"
            raise _Lost(end, fix) from None
        if isinstance(message, BaseException):
            raise message
        if message is None:
            return None
        leaves, tree, state, seconds = message
        leaves = [self._memory.array(*leaf).copy() if isinstance(leaf, _Place) else leaf for leaf in leaves]
        try:
            self.connection.send(None)  # the memory is free again
        except OSError:
            pass  # it died, which the next call finds out; this element is whole
        return jax.tree.unflatten(tree, leaves), state, seconds


class _Place(tuple[tuple[int, ...], np.dtype, int]):
    """Shape, dtype and offset of an array in shared memory."""


class _Memory:
    """Memory that two processes share through a file without a name; it grows to what is asked for."""

    def __init__(self, inherited: Any = None):
        self._mapped: mmap.mmap | None = None
        if inherited is not None:
            self._descriptor = inherited.detach()
        elif hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("jepa_jax-batch", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())

    def array(self, shape: tuple[int, ...], dtype: np.dtype, offset: int) -> np.ndarray:
        """Returns the array at an offset in bytes; it is only valid until the memory is used again."""
        end = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if self._mapped is None or len(self._mapped) < end:
            if os.fstat(self._descriptor).st_size < end:
                os.ftruncate(self._descriptor, end)
            self._mapped = mmap.mmap(self._descriptor, 0) if end else None
        return np.ndarray(shape, dtype, self._mapped, offset) if end else np.empty(shape, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Memory, (reduction.DupFd(self._descriptor),)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._descriptor)


# --- in the worker ---


def _work(pipe: connection.Connection, memory: _Memory, dataset: bytes, *share: Any) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):  # for the main process; a scheduler sends them to all at once
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()
    try:
        start, is_first = time.perf_counter(), True
        for element, after in _told_apart(_elements(cloudpickle.loads(dataset), *share)):
            seconds = time.perf_counter() - start
            leaves, tree = jax.tree.flatten(element)
            if not is_first:
                pipe.recv()  # the element before has been read
            pipe.send((_stored(leaves, memory), tree, after, seconds))
            start, is_first = time.perf_counter(), False
        pipe.send(None)
        pipe.recv()
    except (EOFError, ConnectionError):
        return  # the main process has closed its end
    except BaseException as error:
        pipe.send(_sendable(error))


def _told_apart(elements: Iterator[Any]) -> Iterator[Any]:
    """Yields elements; raises another error where theirs would look like a closed pipe."""
    try:
        yield from elements
    except (EOFError, ConnectionError) as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def read_options(threads: int) -> grain.ReadOptions:
    """Returns how Grain makes so many elements at once; one is made by the thread that asks for it."""
    return grain.ReadOptions(*2 * [threads if threads > 1 else 0])


def _elements(dataset: Any, state: State, index: int, count: int, threads: int) -> Iterator[tuple[Any, State]]:
    """Yields every `count`-th element after a state, from the `index`-th on, with the state after it."""
    if isinstance(dataset, grain.MapDataset):
        assert state is not None
        numbers = range(state["next_index"] + index, len(dataset), count)
        part = dataset.slice(slice(numbers.start, None, count)).to_iter_dataset(read_options(threads), allow_nones=True)
        for n, element in zip(numbers, part, strict=True):
            yield element, {"next_index": n + 1}
        return
    iterator = iter(dataset)
    if state is not None:
        iterator.set_state(state)
    for element in iterator:
        yield element, iterator.get_state()


def _stored(leaves: list[Any], memory: _Memory) -> list[Any]:
    """Copies arrays into shared memory; returns where they are, and everything else as it is."""
    places, offset = list(leaves), 0
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            places[number] = _Place((leaf.shape, leaf.dtype, offset))
            offset += -(-leaf.nbytes // ALIGNMENT) * ALIGNMENT
    for leaf, place in zip(reversed(leaves), reversed(places), strict=True):  # the last one first: memory grows once
        if isinstance(place, _Place):
            np.copyto(memory.array(*place), leaf, casting="no")
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
