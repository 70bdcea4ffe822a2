"""Throughput of the loop, its share of the peak (MFU), and the time and memory that a run has used.

The peak of a GPU is in a table. That of a CPU is measured beside the run: what a core does per second of CPU time
depends on what its neighbours do, so a figure of another hour could be half of it, or twice.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import psutil

from jepa_jax.base.processes import num_cores
from jepa_jax.profiling.sections import Timeline
from jepa_jax.runtime import hardware
from jepa_jax.runtime import memory as process_memory

REACHED = 0.4  # of the peak rate, that steps are taken to reach before one was measured
MATRIX = 768  # rows of the square float32 product that is timed
REPEATS = 5
FEWEST_STEPS = 5  # that a time per step is known from


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
        return self._figures(mark, self._waited())

    def _figures(self, mark: str, waited_now: float) -> dict[str, float | None]:
        steps_then, seconds_then, waited_then = self._marks.get(mark, (*self._now, 0.0))
        steps, elapsed = self._now[0] - steps_then, self._now[1] - seconds_then
        if not steps or elapsed <= 0:
            return {"images_per_sec": None, "data_wait_percent": None}
        waited = min(waited_now - waited_then, elapsed)
        return {"images_per_sec": steps * self._batch_size / elapsed, "data_wait_percent": 100 * waited / elapsed}

    def next_window(self) -> dict[str, float | None]:
        """Returns the figures of the window that ends here, and starts a new one."""
        waited = self._waited()  # once: the profiler accounts for all segments since the last call
        figures = self._figures("window", waited)
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
        self._wall_before, self._cpu_before = wall_seconds, cpu_seconds

    def wall_seconds(self) -> float:
        return self._wall_before + self._started + time.perf_counter() - self._since

    def totals(self) -> dict[str, float]:
        """Returns wall and CPU seconds; CPU is user + system of this process and its children, running or ended."""
        own = os.times()
        cpu = own.user + own.system + own.children_user + own.children_system
        cpu += cpu_seconds(psutil.Process().children(recursive=True))
        return {"wall_seconds": self.wall_seconds(), "cpu_seconds": self._cpu_before + cpu}


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Returns user + system seconds of those of these processes that still run."""
    seconds = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            seconds += times.user + times.system
    return seconds


def peak_memory_bytes() -> int:
    """Returns the peak of the first device's allocator; on CPU, which has none, that of the process."""
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    return process_memory.peak_bytes()


def mfu(flops_per_step: float | None, seconds_per_step: float | None, steps: int, peak: float | None) -> float | None:
    """Returns the share of the peak that matrix products and convolutions reach, 0 to 1; None if it is not known.

    Args:
      flops_per_step: operations of the step, without what `train.remat` computes again.
      seconds_per_step: mean time from step to step, waiting included.
      steps: of which that is the mean; a few say too little.
      peak: FLOP per second of all devices; a share above 1 of it shows that it is not the peak.
    """
    if not flops_per_step or not seconds_per_step or not peak or steps < FEWEST_STEPS:
        return None
    share = flops_per_step / seconds_per_step / peak
    return share if share <= 1 else None


def peak_flops(given_tflops: float, precision: str, num_devices: int | None = None) -> tuple[float | None, str]:
    """Returns FLOP per second of the devices together (None if unknown) and where the figure is from.

    Args:
      given_tflops: `profile.peak_tflops`, of one device; 0 = look it up.
      precision: `train.precision`, which a GPU's peak depends on.
      num_devices: how many take part; all by default. CPU devices share the cores, so their number does not matter.
    """
    num_devices = num_devices or jax.device_count()
    if given_tflops:
        return given_tflops * 1e12 * num_devices, "profile.peak_tflops"
    device = jax.devices()[0]
    if device.platform == "cpu":
        return num_cores() * measure_product(), "best float32 product measured beside this run, times the cores"
    limit = (device.memory_stats() or {}).get("bytes_limit")
    gpu = hardware.gpu_of_device(device.device_kind, limit, hardware.load_table())
    if gpu is None:
        return None, f"{device.device_kind} is not in the table of GPUs: set profile.peak_tflops for an MFU"
    return gpu.tflops(precision) * 1e12 * num_devices, f"{gpu.name}, {precision}"


def loader_balance(
    batch_size: int, generation_seconds: float, workers: int, flops: float | None, peak: float | None
) -> tuple[str, bool]:
    """Returns what the loader can give beside what the step wants, in words, and whether that is more.

    Args:
      generation_seconds: that a worker, or the loading thread, took for a batch; the first one takes longest.
      flops: of a step.
      peak: FLOP per second of all devices; None if unknown, then nothing is said.
    """
    if not (flops and peak and generation_seconds > 0):
        return "", False
    given = batch_size / generation_seconds * max(1, workers)
    wanted = batch_size * REACHED * peak / flops
    by = f"{workers} workers" if workers else "a thread"
    text = f"loader: {by} give about {given:,.0f} elements/s; the step wants {wanted:,.0f} at {REACHED:.0%} of the peak"
    return text, given < wanted


@functools.cache
def _product() -> Callable[[Any], jax.Array]:
    return jax.jit(lambda matrix: matrix @ matrix)


def measure_product(clock: Callable[[], float] = time.process_time) -> float:
    """Returns FLOP per second of CPU time of one core: the fastest of a few products of XLA, 50 ms together.

    NumPy's library of matrix products reaches half or all of the same peak, depending on its version.
    """
    seconds = []
    with jax.transfer_guard("allow"):
        matrix = jax.device_put(np.ones([MATRIX, MATRIX], np.float32), jax.local_devices()[0])
        for _ in range(REPEATS + 1):  # the first one compiles
            start = clock()
            jax.block_until_ready(_product()(matrix))
            seconds.append(clock() - start)
    return 2 * MATRIX**3 / max(min(seconds), 1e-9)
