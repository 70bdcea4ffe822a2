"""Detects memory that grows from step to step.

`find_leak` decides, for the samples of a run and for the readings of a trial. Trials read memory while no step runs. On
CPUs the size of the process is no guide: it keeps freed memory, from which a leak is then served, and it jumps when
temporaries find no room. So memory in use is counted: malloc's own account, and what is resident outside malloc's heap.
Gaps that were set aside after compilation (runtime/allocator.py) count as in use; growth begins later.
On accelerators the allocator knows what it has handed out.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
import psutil

from jepa_jax.runtime.allocator import MallocAccount, malloc_account

MATERIAL_BYTES_PER_STEP = 64 * 1024  # less is not called a leak: 32 MB in 500 steps
SUSTAINED = 0.5  # of the typical growth, that every stretch of steps must show
SIGMAS = 6.0  # of the slope's standard error, that it must exceed
BLOCKS = 4  # further stretches of steps to take if memory has grown
SETTLE_SECONDS, SETTLE_EVERY = 0.5, 0.02  # for the loader to refill its queue

InUse = Mapping[str, int]  # bytes, by place


def memory_in_use() -> InUse:
    """Returns bytes in use: `host` by malloc's account, `mapped` outside its heap, `device` by JAX's allocators."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return in_use(psutil.Process().memory_info().rss, malloc_account(), stats)


def in_use(resident: int, heap: MallocAccount | None, stats: Sequence[Mapping[str, int]]) -> InUse:
    """Returns bytes in use by place, from the readings that `memory_in_use` takes."""
    used = {"mapped": resident}
    if heap is not None:
        used = {"host": heap.uordblks + heap.hblkhd, "mapped": resident - heap.arena - heap.hblkhd}
    if any("bytes_in_use" in known for known in stats):
        used["device"] = sum(known.get("bytes_in_use", 0) for known in stats)
    return used


def settled(read: Callable[[], InUse] = memory_in_use, sleep: Callable[[float], None] = time.sleep) -> InUse:
    """Waits until two readings agree, as the loader refills its queue, or for half a second; returns the last."""
    before = read()
    for _ in range(round(SETTLE_SECONDS / SETTLE_EVERY)):
        sleep(SETTLE_EVERY)
        now = read()
        if all(abs(now[name] - before[name]) < MATERIAL_BYTES_PER_STEP for name in now):
            return now
        before = now
    return before


@dataclasses.dataclass(frozen=True)
class Growth:
    """Growth in bytes per step; `leaks` names the places where it is sustained and material."""

    bytes_per_step: float
    leaks: tuple[str, ...] = ()


def is_suspicious(points: Sequence[tuple[int, InUse]]) -> bool:
    """Returns whether more steps are needed to see if memory keeps growing."""
    (first, before), (last, after) = points[0], points[-1]
    return any(after[name] - before[name] > MATERIAL_BYTES_PER_STEP / 2 * (last - first) for name in after)


def growth(points: Sequence[tuple[int, InUse]]) -> Growth:
    """Returns the growth over (steps, reading); a leak needs BLOCKS stretches after the first."""
    slopes, leaks = {}, []
    for name in points[0][1]:
        series = [(step, used[name]) for step, used in points]
        slopes[name] = theil_sen(series)
        if len(points) > BLOCKS + 1 and find_leak(series, MATERIAL_BYTES_PER_STEP) is not None:
            leaks.append(name)
    # Places that do not leak only add scatter.
    return Growth(sum(slopes[name] for name in leaks or slopes), tuple(leaks))


def find_leak(points: Sequence[tuple[float, float]], material: float, parts: int | None = None) -> float | None:
    """Returns the growth per step of memory that keeps growing; None for jumps, filling caches and scatter.

    Args:
        points: steps and memory in use, in any unit.
        material: growth per step below which nothing is a leak.
        parts: into how many parts noisy points are divided; memory must grow from the median of each to the next, and
            by similar amounts. By default each point is a part.
    """
    cuts = [len(points) * i // (parts or len(points)) for i in range((parts or len(points)) + 1)]
    medians = [np.median(points[a:b], axis=0) for a, b in itertools.pairwise(cuts)]
    rates = [float((b[1] - a[1]) / (b[0] - a[0])) for a, b in itertools.pairwise(medians)]
    slope, typical = theil_sen(points), statistics.median(rates)
    fitted, error = least_squares(points)
    if min(slope, typical) < material or min(rates) < SUSTAINED * typical or fitted <= SIGMAS * error:
        return None
    return slope


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """Returns the median slope over all pairs of points, which a single outlier does not change."""
    x, y = np.asarray(points, np.float64).T
    first, second = np.triu_indices(len(x), 1)
    apart = x[first] != x[second]
    slopes = (y[second] - y[first])[apart] / (x[second] - x[first])[apart]
    return float(np.median(slopes)) if len(slopes) else 0.0


def least_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the least-squares slope and its standard error; (0, inf) if there is nothing to fit."""
    x, y = np.asarray(points, np.float64).T
    if len(x) < 3 or x.max() == x.min():
        return 0.0, math.inf
    fitted, covariance = np.polyfit(x, y, 1, cov=True)
    return float(fitted[0]), math.sqrt(covariance[0, 0])
