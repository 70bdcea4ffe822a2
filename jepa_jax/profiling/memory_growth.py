"""Does memory grow from step to step? Memory in use is read while nothing is under way, never inside a timed step.

On CPUs the size of the process is no guide: freed memory stays in it (`memory.py`), so that a leak is served from what
is free, and a step whose temporaries found no room makes it jump. What counts is what is in use: malloc's own account,
and what is resident outside malloc's heap. On accelerators the allocator says what it has handed out.
"""

import ctypes
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

MATERIAL_BYTES_PER_STEP = 64 * 1024  # less is not called a leak: 32 MB in 500 steps
SUSTAINED = 0.3  # of the typical growth, that every stretch of steps must show
BLOCKS = 4  # further stretches of steps that are taken where memory has grown
SETTLE_SECONDS, SETTLE_EVERY = 0.5, 0.02  # for the loader to fill its queue again

InUse = Mapping[str, int]  # bytes by where they are


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def memory_in_use() -> InUse:
    """Bytes in use: `host` by malloc's account, `mapped` resident outside its heap, `device` by JAX's allocators."""
    import jax
    import psutil

    resident = psutil.Process().memory_info().rss
    used = {"mapped": resident}
    heap = _malloc_info()
    if heap is not None:
        used = {"host": heap.uordblks + heap.hblkhd, "mapped": resident - heap.arena - heap.hblkhd}
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if any("bytes_in_use" in known for known in stats):
        used["device"] = sum(known.get("bytes_in_use", 0) for known in stats)
    return used


def _malloc_info() -> _MallInfo | None:
    """None where the C library is not glibc 2.33 or newer."""
    if sys.platform != "linux":
        return None
    try:
        ask = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    ask.restype = _MallInfo
    return ask()


def settled(read: Callable[[], InUse] = memory_in_use, sleep: Callable[[float], None] = time.sleep) -> InUse:
    """Memory in use once the loader has filled its queue again: two readings alike, or half a second later."""
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
    """Bytes a step; `leaks` names where it is sustained and material."""

    bytes_per_step: float
    leaks: tuple[str, ...] = ()


def is_suspicious(points: Sequence[tuple[int, InUse]]) -> bool:
    """Whether more steps should be taken to see if memory goes on growing."""
    (first, before), (last, after) = points[0], points[-1]
    return any(after[name] - before[name] > MATERIAL_BYTES_PER_STEP / 2 * (last - first) for name in after)


def growth(points: Sequence[tuple[int, InUse]]) -> Growth:
    """Of readings after so many steps. What grows once and stays is no leak: every stretch must grow, and alike."""
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
    # What does not leak is scatter: it would only blur the figure of what does.
    return Growth(sum(slopes[name] for name in leaks or slopes), tuple(leaks))


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """The median slope of all pairs of points: a single odd one does not move it."""
    slopes = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 != x1]
    return statistics.median(slopes) if slopes else 0.0
