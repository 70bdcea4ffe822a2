"""Times training steps and reads what they take of the machine.

Steps are taken through the training loop's own `Steps`: step n is dispatched before the metrics of step n - 1 are read,
and a step is complete when its metrics have been read. The clock runs from the completion of one step to that of
another, both read while the following step is under way, so that the device never waits for the clock. Batches that the
loader made while the step was compiled are discarded first.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import psutil

from jepa_jax.config.groups import Config
from jepa_jax.data.pipeline import TrainBatches, batches_ready
from jepa_jax.experiments.rows import Figures
from jepa_jax.experiments.settings import TrialRequest
from jepa_jax.profiling import memory_growth, monitor
from jepa_jax.profiling.accounting import DeviceClock, Ledger
from jepa_jax.profiling.compilations import CompiledStep
from jepa_jax.profiling.epoch_record import gpu_figures
from jepa_jax.profiling.sections import Section, Timeline
from jepa_jax.program.step import TrainState
from jepa_jax.program.step_metrics import StepMetrics
from jepa_jax.runtime import memory as process_memory
from jepa_jax.training.progress import Loop, Progress
from jepa_jax.training.steps import Steps

MONITOR_SECONDS = 0.5

ReadMemory = Callable[[], memory_growth.InUse]
OnStep = Callable[[dict[str, jax.Array], StepMetrics], object]  # called with the batch and the metrics of each step


def ignore(batch: Any, metrics: Any) -> None:
    """Does nothing; the default of `on_step`."""


class TimedSteps:
    """Takes steps as training does; notes when they were complete and when the device lacked data."""

    def __init__(
        self,
        step: CompiledStep,
        state: TrainState,
        batches: TrainBatches,
        device: DeviceClock,
        on_step: OnStep = ignore,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._batches, self._on_step, self._clock = batches, on_step, clock
        timeline = Timeline(clock, keep_segments=True)
        self._ledger = Ledger(timeline, device.take)
        self._steps = Steps(step, timeline, lambda began, result, info: device.dispatched(began, result))
        self._loop = Loop(0, state, Progress())
        self.completed: list[float] = []
        self.finite = True

    @property
    def state(self) -> TrainState:
        return self._loop.state

    def take(self, steps: int) -> None:
        for _ in range(steps):
            delivery = self._steps.wait_for(self._batches)
            metrics = self._steps.dispatch(self._loop, delivery)
            self._read(lag=1)
            self._on_step(delivery[0], metrics)

    def discard(self, batches: int) -> None:
        """Takes batches from the loader and does nothing with them."""
        for _ in range(batches):
            next(self._batches)

    def drain(self) -> None:
        """Waits until no step is under way."""
        self._read(lag=0)

    def waited_for_data(self) -> float:
        """Returns the seconds until now in which the device was idle for lack of data, as training counts them."""
        return self._ledger.update().exposed.get(Section.DATA_WAIT, 0.0)

    def _read(self, lag: int) -> None:
        for _, metrics in self._steps.read(lag=lag):
            self.finite = self.finite and math.isfinite(metrics["loss"])
            self.completed.append(self._clock())


def measure_steps(
    config: Config, request: TrialRequest, loop: TimedSteps, read_memory: ReadMemory = memory_growth.settled
) -> Figures:
    """Takes warm-up steps, then the timed ones, and more of them if memory has grown."""
    workers = psutil.Process().children(recursive=True)
    watch = monitor.Monitor(MONITOR_SECONDS)
    count, images = request.max_batches, request.max_batches * config.data.batch_size
    try:
        points = [(len(loop.completed), read_memory())]
        discarded = batches_ready(config.data)
        loop.discard(discarded)
        loop.take(request.warmup_batches + 1)  # the last of them is timed: the one before it is complete now
        began, waited_before, cpu_before = loop.completed[-1], loop.waited_for_data(), _cpu_seconds(workers)
        watch.start()
        loop.take(count)  # the last of them is not timed: it is under way at the end, as one was at the start
        elapsed = loop.completed[-1] - began
        waited, cpu = loop.waited_for_data() - waited_before, _cpu_seconds(workers) - cpu_before
        samples = watch.take()
    finally:
        watch.close()
    times = np.diff(loop.completed[-count - 1 :])
    loop.drain()
    process_memory_bytes = process_memory.peak_bytes() + sum(_resident(worker) for worker in workers)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    growth = find_growth(loop, points, count, read_memory)
    gpus = gpu_figures(samples)
    return Figures(
        samples_per_sec=images / elapsed,
        batches_per_sec=count / elapsed,
        avg_step_time=elapsed / count,
        step_time_p50=float(np.percentile(times, 50)),
        step_time_p95=float(np.percentile(times, 95)),
        samples_processed=images,
        measured_batches=count,
        warmup_batches=request.warmup_batches,
        discarded_batches=discarded,
        elapsed_seconds=elapsed,
        cpu_percent=100 * cpu / elapsed,
        system_cpu_percent=monitor.mean(samples, "cpu_percent"),
        gpu_sm_util=monitor.mean(gpus, "utilization"),
        gpu_mem_util=monitor.mean(gpus, "memory_percent"),
        peak_memory_bytes=max((value for value in peaks if value is not None), default=None),
        process_memory_bytes=process_memory_bytes,
        memory_slope_bytes_per_step=growth.bytes_per_step,
        leak=bool(growth.leaks),
        finite=loop.finite,
        data_wait_fraction=min(1.0, waited / elapsed),
        notes=tuple(_notes(config, loop, growth)),
    )


def find_growth(
    loop: TimedSteps, points: list[tuple[int, memory_growth.InUse]], count: int, read_memory: ReadMemory
) -> memory_growth.Growth:
    """Returns the growth of memory since the readings in `points`; takes more steps if it may be a leak."""
    points.append((len(loop.completed), read_memory()))
    for _ in range(memory_growth.BLOCKS if memory_growth.is_suspicious(points) else 0):
        loop.take(max(4, count // memory_growth.BLOCKS))
        loop.drain()
        points.append((len(loop.completed), read_memory()))
    return memory_growth.growth(points)


def _notes(config: Config, loop: TimedSteps, growth: memory_growth.Growth) -> Iterator[str]:
    if config.data.pipeline == "device" and config.data.num_workers:
        yield "num_workers has no effect: with pipeline=device nothing is loaded"
    if growth.leaks:
        where = " and ".join(growth.leaks)
        yield f"leak: memory ({where}) grows by {growth.bytes_per_step / 1e6:.3g} MB per step"
    if not loop.finite:
        yield "the loss is not finite"


def _cpu_seconds(workers: list[psutil.Process]) -> float:
    """Returns the CPU time of this process and of the loader's workers."""
    seconds = time.process_time()
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            times = worker.cpu_times()
            seconds += times.user + times.system
    return seconds


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
