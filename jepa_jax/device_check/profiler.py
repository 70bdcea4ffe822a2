"""Profiler: what it finds of a loop whose truth is known, against this module's own clock."""

import math
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jepa_jax.base.files import read_json
from jepa_jax.device_check.findings import Findings
from jepa_jax.profiling.device_time import read_device_time
from jepa_jax.profiling.own_loop import LoopProfiler
from jepa_jax.profiling.sections import Section
from jepa_jax.profiling.trace import ShortTrace

SIZE = {"gpu": 8192, "cpu": 768}  # of the products of a step, which takes tens of milliseconds
PRODUCTS = {"gpu": 8, "cpu": 8}
STEPS = 8
BUSY_TOLERANCE = 0.03  # of the wall clock, while a GPU never waits
ATTRIBUTED = 0.95  # of the device's time
SLEEP_SECONDS = 0.15  # injected before every batch
SLEEP_TOLERANCE = 0.03  # of it


def make_step(platform: str) -> tuple[Any, jax.Array, jax.Array]:
    """Returns a jitted step of (state, batch) that only multiplies, and its arguments."""
    state = jnp.eye(SIZE[platform], dtype=jnp.float32)

    def step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("products"):
            for _ in range(PRODUCTS[platform]):
                state = state @ batch
        return state, jnp.sum(state[0])

    return jax.jit(step), state, state


def check_busy_time(platform: str, findings: Findings) -> None:
    """Compares the traced time of steps that follow each other without a pause with the wall clock."""
    step, state, batch = make_step(platform)
    text = step.lower(state, batch).compile().as_text()
    state, last = step(state, batch)
    jax.block_until_ready(last)
    trace = ShortTrace()
    trace.start()
    began = time.perf_counter()
    for _ in range(STEPS):
        state, last = step(state, batch)
    jax.block_until_ready(last)
    wall = (time.perf_counter() - began) / STEPS
    found = read_device_time(trace.stop(), text, steps=STEPS, platform=platform)
    findings.true("a recording shows the step", found is not None)
    if found is None:
        return
    findings.true("the recording names the products", any(row["scope"] == "products" for row in found.scopes))
    if platform == "cpu":  # which shares its cores with other programs, so that no span of time is sure
        findings.note("share of the device's time with a name", found.attributed)
        findings.note("traced busy time / wall clock", found.busy_seconds / wall)
    else:
        findings.at_least("share of the device's time with a name", found.attributed, ATTRIBUTED)
        low, high = 1 - BUSY_TOLERANCE, 1 + BUSY_TOLERANCE
        findings.between("traced busy time / wall clock", found.busy_seconds / wall, low, high)


def check_sleep(platform: str, findings: Findings) -> None:
    """Sleeps in front of every batch; the profiler has to find as much waiting for data."""
    step, state, batch = make_step(platform)
    slept = []

    def batches() -> Iterator[jax.Array]:
        for _ in range(2 * STEPS):
            began = time.perf_counter()
            time.sleep(SLEEP_SECONDS)
            slept.append(time.perf_counter() - began)
            yield batch

    with tempfile.TemporaryDirectory() as folder:
        profiler = LoopProfiler(
            step, pathlib.Path(folder), batch_size=1, steps_per_epoch=STEPS, precision="float32", trace_steps="",
            write_page=lambda path: None,
        )  # fmt: skip
        with profiler:
            for one in profiler.batches(batches()):
                state, _ = profiler.step(state, one)
        epochs = read_json(pathlib.Path(folder) / "profile.json", "")["epochs"]
    found = sum(epoch["host"][Section.DATA_WAIT] for epoch in epochs)
    low, high = 1 - SLEEP_TOLERANCE, 1 + SLEEP_TOLERANCE
    if platform == "cpu":  # on which other programs may run between the profiler's clock and this one, for any time
        high = math.inf
    findings.between("wait for data found / injected", found / sum(slept), low, high)


def run(findings: Findings, minutes: float) -> None:
    """Checks the device's timeline, and a wait that was injected."""
    platform = jax.local_devices()[0].platform
    check_busy_time(platform, findings)
    check_sleep(platform, findings)
