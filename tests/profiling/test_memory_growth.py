"""Memory growth: what goes on is a leak, what stops is none, and what is kept is counted."""

import pytest

from jepa_jax.profiling.memory_growth import (
    growth,
    in_use,
    is_suspicious,
    least_squares,
    memory_in_use,
    settled,
    theil_sen,
)
from jepa_jax.runtime.allocator import MallocAccount

MB = 10**6


def points(*series):
    """Readings at the start, after 36 steps and after four times 8 more."""
    return [(step, dict(zip(("host", "mapped"), values, strict=True))) for step, *values in series]


STEPS = (1, 37, 45, 53, 61, 69)


def test_growth_that_goes_on_is_a_leak_and_growth_that_stops_is_none():
    leaking = points(*((step, 100 * MB + MB * step, 7 * MB + step % 3) for step in STEPS))
    assert is_suspicious(leaking[:2])
    found = growth(leaking)
    assert found.leaks == ("host",) and found.bytes_per_step == pytest.approx(MB, rel=0.01)
    once = points(*((step, 100 * MB + 40 * MB * (step > 1), 7 * MB) for step in STEPS))
    assert is_suspicious(once[:2]) and not growth(once).leaks
    jumps = points(*((step, 100 * MB + 30 * MB * (step > 1) + 30 * MB * (step > 50), 7 * MB) for step in STEPS))
    assert not growth(jumps).leaks
    small = points(*((step, 100 * MB + 60_000 * step, 7 * MB) for step in STEPS))  # 60 kB a step is not material
    assert not growth(small).leaks
    assert not is_suspicious(points((1, 100 * MB, 0), (37, 100 * MB + 36 * 20_000, 0)))


def test_a_single_odd_point_does_not_move_the_slope():
    line = [(x, 3.0 * x) for x in range(9)]
    assert theil_sen(line) == 3.0
    assert theil_sen([*line[:4], (4, 1e9), *line[5:]]) == 3.0
    assert least_squares(line) == pytest.approx((3.0, 0.0), abs=1e-12)


def test_memory_in_use_is_what_malloc_handed_out_what_lies_outside_its_heap_and_what_devices_hold():
    """malloc counts what is kept whether it is written to or not; freed parts of its heap are not in use."""
    heap = MallocAccount(arena=50 * MB, uordblks=30 * MB, hblkhd=8 * MB)
    assert in_use(100 * MB, heap, [{}]) == {"host": 38 * MB, "mapped": 42 * MB}
    assert in_use(100 * MB, None, [{}]) == {"mapped": 100 * MB}
    assert in_use(9, None, [{"bytes_in_use": 3}, {"bytes_in_use": 4}]) == {"mapped": 9, "device": 7}
    assert set(memory_in_use()) >= {"mapped"}


def test_readings_are_repeated_until_two_agree():
    readings = iter([{"host": size * MB} for size in (1, 2, 3, 3, 9)])
    assert settled(lambda: next(readings), sleep=lambda seconds: None) == {"host": 3 * MB}
