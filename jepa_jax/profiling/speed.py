"""Throughput of the loop, and the time and memory that a run has used."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import psutil

from jepa_jax.profiling.sections import Timeline
from jepa_jax.runtime import memory as process_memory


class Speedometer:
    """Rates between completed steps; the first step includes the compilation and only starts the clock."""

    def __init__(self, timeline: Timeline, batch_size: int, waited: Callable[[], float]):
        """`waited` returns the seconds until now that went into waiting for data."""
        self._timeline, self._batch_size, self._waited = timeline, batch_size, waited
        self._now = (0, 0.0)  # step, seconds in steps
        self._marks: dict[str, tuple[int, float, float]] = {}  # and seconds waiting for data

    def completed(self, step: int) -> None:
        """Reports that the metrics of `step` have been read."""
        self._now = (step, self._timeline.step_seconds())
        if not self._marks:
            self._marks = dict.fromkeys(("run", "window"), (*self._now, self._waited()))

    def since(self, mark: str) -> dict[str, float | None]:
        """Returns images per second and percent of time spent waiting for data, since the mark "run" or "window"."""
        return self._since(mark, self._waited())

    def _since(self, mark: str, waited_now: float) -> dict[str, float | None]:
        steps_then, seconds_then, waited_then = self._marks.get(mark, (*self._now, 0.0))
        steps, elapsed = self._now[0] - steps_then, self._now[1] - seconds_then
        if not steps or elapsed <= 0:
            return {"images_per_sec": None, "data_wait_percent": None}
        waited = min(waited_now - waited_then, elapsed)
        return {"images_per_sec": steps * self._batch_size / elapsed, "data_wait_percent": 100 * waited / elapsed}

    def next_window(self) -> dict[str, float | None]:
        """Returns the figures of the window that ends here, and starts a new one."""
        waited = self._waited()
        figures = self._since("window", waited)
        self._marks["window"] = (*self._now, waited)
        return figures


class Usage:
    """Wall and CPU seconds of a run, including those of its earlier sessions."""

    def __init__(self) -> None:
        self._wall_before = self._cpu_before = 0.0
        # The run's time is the process's time: imports count.
        self._started = time.time() - psutil.Process().create_time()
        self._since = time.perf_counter()

    def continue_from(self, wall_seconds: float, cpu_seconds: float) -> None:
        """Adds what earlier sessions have used."""
        self._wall_before, self._cpu_before = wall_seconds, cpu_seconds

    def wall_seconds(self) -> float:
        return self._wall_before + self._started + time.perf_counter() - self._since

    def totals(self) -> dict[str, float]:
        """Returns wall and CPU seconds; CPU is user + system of this process and its children, running or ended."""
        own = os.times()
        cpu = own.user + own.system + own.children_user + own.children_system
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                cpu += times.user + times.system
        return {"wall_seconds": self.wall_seconds(), "cpu_seconds": self._cpu_before + cpu}


def peak_memory_bytes() -> int:
    """Returns the peak of the first device's allocator; on CPU, which has none, that of the process."""
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return process_memory.peak_bytes()
