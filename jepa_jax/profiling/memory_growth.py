"""Detects memory that grows from step to step; memory is read while no step is running.

On CPUs the size of the process is no guide: it keeps freed memory, from which a leak is then served, and it jumps when
temporaries find no room. So memory in use is counted: malloc's own account, and what is resident outside malloc's heap.
Gaps that were set aside after compilation (runtime/allocator.py) count as in use; growth begins later.
On accelerators the allocator knows what it has handed out.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from jepa_jax.runtime.allocator import malloc_account

MATERIAL_BYTES_PER_STEP = 64 * 1024  # less is not called a leak: 32 MB in 500 steps
SUSTAINED = 0.3  # of the typical growth, that every stretch of steps must show
BLOCKS = 4  # further stretches of steps to take if memory has grown
SETTLE_SECONDS, SETTLE_EVERY = 0.5, 0.02  # for the loader to refill its queue

InUse = Mapping[str, int]  # bytes, by place


def memory_in_use() -> InUse:
    """Returns bytes in use: `host` by malloc's account, `mapped` outside its heap, `device` by JAX's allocators."""
    import jax
    import psutil

    resident = psutil.Process().memory_info().rss
    used = {"mapped": resident}
    heap = malloc_account()
    if heap is not None:
        used = {"host": heap.uordblks + heap.hblkhd, "mapped": resident - heap.arena - heap.hblkhd}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
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
    """Returns the growth over (steps, reading); a leak must grow in every stretch, and by similar amounts."""
    slopes, leaks = {}, []
    for name in points[0][1]:
        stretches = [
            (after[name] - before[name]) / (end - begin)
            for (begin, before), (end, after) in zip(points, points[1:], strict=False)
        ]
        slopes[name] = theil_sen([(step, used[name]) for step, used in points])
        typical = statistics.median(stretches)
        confirmed = len(stretches) > BLOCKS and min(stretches) >= SUSTAINED * typical
        if confirmed and min(typical, slopes[name]) >= MATERIAL_BYTES_PER_STEP:
            leaks.append(name)
    # Places that do not leak only add scatter.
    return Growth(sum(slopes[name] for name in leaks or slopes), tuple(leaks))


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """Returns the median slope over all pairs of points, which a single outlier does not change."""
    slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 != x1]
    return statistics.median(slopes) if slopes else 0.0
