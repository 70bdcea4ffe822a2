"""Checks that the measurement of a trial finds leaks, and nothing else, in a loop that keeps something of every step.

  python profiling/check_leak.py [--config=quickstart] [--max_batches=32] [--mb_per_step=1]

The loop keeps arrays on the device (the usual way to leak), NumPy arrays, many small Python objects, or nothing; `once`
keeps arrays of the first steps only, which is no leak. The result tells for each kind whether it was flagged and the
measured slope over the true one. Exit code 1 if a leak was missed, was off by over 20 %, or was flagged without cause.
"""

import sys
from collections.abc import Callable
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser, config_from

LEAKS = ("device arrays", "numpy arrays", "objects")
KINDS = ("nothing", *LEAKS, "once")


def add_flags(parser: Parser) -> None:
    parser.add_config("quickstart")
    parser.add_flag("max_batches", "N", "measured batches", 32, least=8)
    parser.add_flag("mb_per_step", "MB", "leak per step in millions of bytes", 1.0, least=0.1)


def keeper(kind: str, num_bytes: int) -> Callable[[Any, Any], None]:
    """Returns what the loop calls at each step; kinds in LEAKS keep about `num_bytes` each time."""
    import jax.numpy as jnp
    import numpy as np

    kept: list[Any] = []
    makers: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "device arrays": lambda: jnp.ones([num_bytes], jnp.uint8),
        "numpy arrays": lambda: np.zeros([num_bytes], np.uint8),
        "objects": lambda: [bytes(100) for _ in range(num_bytes // 141)],  # 133 bytes per object, 8 in the list
        "once": lambda: np.ones([num_bytes], np.uint8) if len(kept) < 8 else None,
    }
    return lambda batch, metrics: kept.append(makers[kind]())


def check_leaks(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.experiments.measurement import measure
    from jepa_jax.experiments.settings import Combination, TrialRequest

    config = config_from(arguments)
    request = TrialRequest(config.to_dict(), Combination.of(config), max_batches=arguments.max_batches)
    num_bytes = round(1e6 * arguments.mb_per_step)
    results: dict[str, Any] = {}
    lines, passed = [], True
    for kind in KINDS:
        figures = measure(request, on_step=keeper(kind, num_bytes))
        slope = figures.memory_slope_bytes_per_step or 0.0
        ratio = slope / num_bytes if kind in LEAKS else None
        passed = passed and (not figures.leak if ratio is None else figures.leak and abs(ratio - 1) <= 0.2)
        results[kind] = {"leak": figures.leak, "bytes_per_step": round(slope), "slope_over_true": ratio}
        lines.append(" ".join([f"{kind:>14}: leak {figures.leak}, {slope / 1e6:.3f} MB per step", *figures.notes]))
    return Result([{**results, "passed": passed}], "\n".join(lines), 0 if passed else 1)


if __name__ == "__main__":
    sys.exit(Command("profiling/check_leak.py", __doc__, add_flags, check_leaks, program="python").main())
