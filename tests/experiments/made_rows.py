"""Rows of sweeps made by hand, for tests."""

import dataclasses
import itertools
import math

import numpy as np

from jepa_jax.experiments.rows import SweepRow, TrialFigures, TrialResult
from jepa_jax.experiments.settings import KNOBS, Combination

PLAIN = Combination(64, 0, 1, "float32", "none", "grain")


def make_row(speeds, *, status="ok", reason="", **values):
    """Returns a row; `speeds` by round, None where a repeat failed; `values`: knobs, and figures of every repeat."""
    combination = dataclasses.replace(PLAIN, **{name: values.pop(name) for name in list(values) if name in KNOBS})
    values = {"process_memory_bytes": 10**9} | values
    repeats = tuple(
        TrialResult("ok", "", TrialFigures(speed, **values), number)
        if speed
        else TrialResult("crashed", "x", None, number)
        for number, speed in enumerate(speeds, start=1)
    )
    return SweepRow(combination, status, reason, repeats)


def simulate(seed, *, sigma=0.015, repeats=3, slow=0.0, drift=0.05, hiccups=0.0, fingerprint=False):
    """Twelve combinations (batch x precision x workers); bfloat16 is slower by `slow`, workers change nothing.

    `hiccups`: share of the repeats that somebody else's work slows by up to a half. `fingerprint`: only the batch makes
    another program.
    """
    rng = np.random.default_rng(seed)
    rounds = drift * rng.normal(size=repeats)
    rows = []
    for batch, precision, workers in itertools.product((64, 128, 256), ("float32", "bfloat16"), (0, 2)):
        level = math.log(1000 + batch) + (math.log(1 - slow) if precision == "bfloat16" else 0.0)
        logs = level + rounds + sigma * rng.normal(size=repeats)
        logs -= (rng.random(repeats) < hiccups) * rng.uniform(0.2, 0.6, repeats)
        prints = {"program_fingerprint": f"step of {batch}", "pipeline_fingerprint": "p"} if fingerprint else {}
        knobs = {"batch_size": batch, "precision": precision, "num_workers": workers}
        rows.append(make_row(np.exp(logs).tolist(), **knobs, **prints))
    return rows
