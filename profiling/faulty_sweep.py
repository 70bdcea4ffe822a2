"""Runs `jepa-jax sweep` with trials that fail, or are slowed, on purpose; for checks and tests.

  python profiling/faulty_sweep.py --faults=3:out_of_memory,5:crash,7:hang --config=... --output_json=...

The first flag is --faults, all others are those of jepa-jax sweep. Trials are numbered from 0 in the order of the rows.
Faults happen where a real trial would meet them, when the step is compiled and about to run: `out_of_memory` limits the
address space and asks XLA for more, `crash` aborts, `hang` sleeps. `wait` waits for each step to be complete, and
`slow` waits for a tenth of the step's time longer.

With two files as arguments, as a sweep starts it, this is the process of one trial.
"""

import functools
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from jepa_jax.cli.throughput import SWEEP
from jepa_jax.experiments import trial
from jepa_jax.experiments.rows import TrialFigures
from jepa_jax.experiments.settings import TrialRequest
from jepa_jax.runtime.platforms import import_jax

VARIABLE = "JEPA_JAX_FAULTS"
HEADROOM_BYTES = 2**28  # left when memory runs out, for messages to be written
WAITS = {"wait": 0.0, "slow": 0.10}  # share of a step's time that is added to it


def run_out_of_memory() -> None:
    """Limits the address space to little more than is used, and asks XLA for more than that."""
    import jax
    import numpy as np
    import psutil

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + HEADROOM_BYTES, hard))
    on_device = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    jax.block_until_ready(jax.numpy.ones([max(4 * HEADROOM_BYTES, *on_device) * 2], np.uint8))


def hang() -> None:
    while True:
        time.sleep(60)


class Wait:
    """Waits for each step, and for a share of its time after that, so that nothing can hide the wait.

    It keeps its core busy: on a virtual machine a core that sleeps takes longer to come back than it slept.
    """

    def __init__(self, share: float):
        self._share, self._began = share, time.perf_counter()

    def __call__(self, batch: Any, metrics: Any) -> None:
        import jax

        jax.block_until_ready(metrics)
        ended = time.perf_counter()
        while time.perf_counter() < ended + self._share * (ended - self._began):
            pass
        self._began = time.perf_counter()


def measure(request: TrialRequest, fault: str) -> TrialFigures:
    import_jax()
    from jepa_jax.experiments import measurement

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before: dict[str, Callable[[], None]] = {"out_of_memory": run_out_of_memory, "crash": os.abort, "hang": hang}
    try:
        if fault in WAITS:
            return measurement.measure(request, on_step=Wait(WAITS[fault]))
        return measurement.measure(request, before_steps=before.get(fault, lambda: None))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))  # so that the result can be written


def parse_faults(text: str) -> dict[int, str]:
    """Parses "3:out_of_memory,5:crash" to {3: "out_of_memory", 5: "crash"}."""
    pairs = [part.split(":") for part in filter(None, text.split(","))]
    return {int(number): fault for number, fault in pairs}


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(__doc__)
        return 0 if arguments == ["--help"] else 2
    if arguments[0].startswith("--faults="):
        os.environ[VARIABLE] = arguments[0].partition("=")[2]  # processes of trials inherit it
        trial.TRIAL_COMMAND = (sys.executable, __file__)
        return SWEEP.main(arguments[1:])
    number = int(pathlib.Path(arguments[0]).parent.name.split("_")[0])
    fault = parse_faults(os.environ.get(VARIABLE, "")).get(number, "")
    return trial.main(arguments, functools.partial(measure, fault=fault))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
