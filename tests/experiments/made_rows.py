"""Rows of sweeps made by hand, for tests."""

import dataclasses

from jepa_jax.experiments.rows import Figures, SweepRow, TrialResult
from jepa_jax.experiments.settings import KNOBS, Combination

PLAIN = Combination(64, 0, 1, "float32", "none", "grain")


def make_row(speeds, *, status="ok", reason="", **values):
    """Returns a row; `speeds` by round, None where a repeat failed; `values`: knobs, and figures of every repeat."""
    combination = dataclasses.replace(PLAIN, **{name: values.pop(name) for name in list(values) if name in KNOBS})
    values = {"process_memory_bytes": 10**9} | values
    repeats = tuple(
        TrialResult("ok", "", Figures(speed, **values), number) if speed else TrialResult("crashed", "x", None, number)
        for number, speed in enumerate(speeds, start=1)
    )
    return SweepRow(combination, status, reason, repeats)
