"""Checks that the measurement of a trial finds a leak, and nothing else, in a loop that keeps something of every step.

  python profiling/check_leak.py [--config=quickstart] [--max_batches=32] [--mb_per_step=1]

The loop keeps arrays on the device (the usual way to leak), NumPy arrays, many small Python objects, or nothing; `once`
keeps arrays of the first steps only, which is no leak. The result tells for each kind whether it was flagged and the
measured slope over the true one. Exit code 1 if a leak was missed, was off by over 20 %, or was flagged without cause.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser, config_from

KINDS = ("nothing", "device arrays", "numpy arrays", "objects", "once")


def add_flags(parser: Parser) -> None:
    parser.add_config("quickstart")
    parser.add_flag("max_batches", "N", "measured batches", 32, least=8)
    parser.add_flag("mb_per_step", "MB", "leak per step in millions of bytes", 1.0, least=0.1)


def keeper(kind: str, num_bytes: int) -> tuple[Callable[[Any, Any], None], int]:
    """Returns what the loop calls at each step, and the bytes per step that it leaks."""
    import jax.numpy as jnp
    import numpy as np

    kept: list = []
    makers: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "device arrays": lambda: jnp.ones([num_bytes], jnp.uint8),
        "numpy arrays": lambda: np.zeros([num_bytes], np.uint8),
        "objects": lambda: [bytes(100) for _ in range(num_bytes // 141)],  # 133 bytes per object, 8 in the list
        "once": lambda: np.ones([num_bytes], np.uint8) if len(kept) < 8 else None,
    }

    def on_step(batch: Any, metrics: Any) -> None:
        kept.append(makers[kind]())

    return on_step, num_bytes if kind in ("device arrays", "numpy arrays", "objects") else 0


def check(arguments: argparse.Namespace, console: Console) -> Result:
    from jepa_jax.tuning.measurement import measure
    from jepa_jax.tuning.settings import Combination, TrialRequest

    config = config_from(arguments)
    request = TrialRequest(config.to_dict(), Combination.of(config), max_batches=arguments.max_batches)
    results: dict[str, Any] = {}
    passed = True
    for kind in KINDS:
        on_step, true = keeper(kind, round(1e6 * arguments.mb_per_step))
        figures = measure(request, on_step=on_step)
        slope = figures.memory_slope_bytes_per_step or 0.0
        ratio = slope / true if true else None
        good = not figures.leak if ratio is None else figures.leak and abs(ratio - 1) <= 0.2
        passed = passed and bool(good)
        results[kind] = {"leak": figures.leak, "bytes_per_step": round(slope), "slope_over_true": ratio}
        console.line(" ".join([f"{kind:>14}: leak {figures.leak}, {slope / 1e6:.3f} MB per step", *figures.notes]))
    return Result([{**results, "passed": passed}], "passed" if passed else "failed", 0 if passed else 1)


if __name__ == "__main__":
    sys.exit(Command("profiling/check_leak.py", __doc__, add_flags, check, program="python").main())
