"""Measures when the device is busy: a thread waits for each step, so that the loop never has to."""

import collections
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jepa_jax.profiling.accounting import Interval


class DeviceClock:
    """Intervals in which dispatched steps were computed; a device computes steps one after the other."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        wait: Callable[[Any], Any] = lambda result: result.block_until_ready(),  # of an array, so without a tree
        inline: Callable[[Any], bool] | None = None,
    ):
        """`inline`: whether a call has computed its result; by default on CPUs, where it is ready then."""
        on_cpu = jax.default_backend() == "cpu"
        self._clock, self._wait = clock, wait
        self._inline = inline or (lambda result: on_cpu and result.is_ready())
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: collections.deque[float] = collections.deque()  # when the steps not yet done were dispatched
        self._free_since = 0.0  # the device was done with everything before
        self._busy: list[Interval] = []
        self._thread = threading.Thread(target=self._run, name="device-clock", daemon=True)
        self._thread.start()

    def dispatched(self, began: float, result: Any) -> None:
        """Reports a step; its call began at `began` and has just returned `result`."""
        # CPUs compute small programs inside the call; other devices begin when the call returns.
        # This runs in every step, with cold caches: no lock, since appending to a deque needs none.
        self._running.append(began if self._inline(result) else self._clock())
        self._queue.put(result)

    def take(self, until: float) -> list[Interval]:
        """Returns the busy intervals since the last call up to `until`; a step that is still running is cut in two."""
        with self._lock:
            known = list(self._busy)
            if self._running and max(self._running[0], self._free_since) < until:
                known.append((max(self._running[0], self._free_since), until))
                self._free_since = until
            self._busy = [(max(start, until), end) for start, end in known if end > until]
        return [(start, min(end, until)) for start, end in known if start < until]

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (result := self._queue.get()) is not None:
            try:
                self._wait(result)
            except Exception:  # the loop meets the same error when it reads the result, and says so
                pass
            done = self._clock()
            del result  # the queue must not keep an array alive until the next step
            with self._lock:
                start = max(self._running.popleft(), self._free_since)
                if done > start:
                    self._busy.append((start, done))
                self._free_since = max(done, self._free_since)
