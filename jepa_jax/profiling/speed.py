"""Images a second as the loop sees them, and what a run has used in all."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import psutil

from jepa_jax.profiling.timers import Timeline
from jepa_jax.runtime import memory as process_memory


class Speedometer:
    """Rates between completed steps; the first one holds the compilation and starts the clock."""

    def __init__(self, timeline: Timeline, batch_size: int, waited: Callable[[], float] | None = None):
        """`waited`: seconds so far in which the device had to wait for data; else those of the host."""
        self._timeline, self._batch_size = timeline, batch_size
        self._waited = waited or (lambda: timeline.seconds().get("data_wait", 0.0))
        self._now = (0, 0.0)  # step, seconds in steps
        self._marks: dict[str, tuple[int, float, float]] = {}  # and seconds waiting for data

    def completed(self, step: int) -> None:
        """The metrics of `step` have been read."""
        self._now = (step, self._timeline.step_seconds())
        if not self._marks:
            self._marks = dict.fromkeys(("run", "window"), (*self._now, self._waited()))

    def since(self, mark: str) -> dict[str, float | None]:
        """Images a second and percent of the time spent waiting for data, since the mark "run" or "window"."""
        steps_then, seconds_then, waited_then = self._marks.get(mark, (*self._now, 0.0))
        steps, elapsed = self._now[0] - steps_then, self._now[1] - seconds_then
        if not steps or elapsed <= 0:
            return {"images_per_sec": None, "data_wait_percent": None}
        waited = min(self._waited() - waited_then, elapsed)  # asked for only here: an account is not free
        return {"images_per_sec": steps * self._batch_size / elapsed, "data_wait_percent": 100 * waited / elapsed}

    def next_window(self) -> dict[str, float | None]:
        """The figures of the window that ends here, and a new window."""
        figures = self.since("window")
        self._marks["window"] = (*self._now, self._waited())
        return figures


class Usage:
    """Wall and CPU seconds of a run, added to those of the sessions before it."""

    def __init__(self, wall_seconds: float, cpu_seconds: float):
        self._wall_before, self._cpu_before = wall_seconds, cpu_seconds
        # The run's time is the process's time: imports count.
        self._started = time.time() - psutil.Process().create_time()
        self._since = time.perf_counter()

    def wall_seconds(self) -> float:
        return self._wall_before + self._started + time.perf_counter() - self._since

    def totals(self) -> dict[str, float]:
        """CPU time is user + system of this process and its children, also of those still running."""
        own = os.times()
        cpu = own.user + own.system + own.children_user + own.children_system
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                cpu += times.user + times.system
        return {"wall_seconds": self.wall_seconds(), "cpu_seconds": self._cpu_before + cpu}


def peak_memory_bytes() -> int:
    """The allocator's peak of the first device; on CPU, where there is none, the process's own."""
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return process_memory.peak_bytes()
