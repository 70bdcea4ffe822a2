"""Memory growth: what goes on is a leak, what stops is none, and what is kept is counted."""

import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.profiling import memory_growth
from jepa_jax.profiling.memory_growth import growth, is_suspicious, theil_sen

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


def test_memory_in_use_counts_what_is_kept_whether_it_is_written_to_or_not():
    jnp.ones(4 * MB, jnp.uint8).block_until_ready()  # compiled
    before = memory_growth.memory_in_use()
    kept = [np.zeros(4 * MB, np.uint8), jnp.ones(4 * MB, jnp.uint8)]
    after = memory_growth.memory_in_use()
    assert after["host"] - before["host"] == pytest.approx(8 * MB, rel=0.1)
    del kept
