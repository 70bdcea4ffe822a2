"""Checks that a leak is found, and nothing else: measures steps with a loop that keeps something of every step.

    python profiling/check_leak.py [--config=configs/quickstart.py] [--max_batches=32] [--mb_per_step=1]

It keeps arrays on the device (the usual way to leak), arrays of numpy, many small Python objects, or nothing; `once`
keeps arrays of the first steps only, which is no leak. The last line is a JSON object: for each kind whether it was
flagged and the slope over the true one. Exit code 1 if one was missed, was off by over 20 %, or was flagged without
cause.
"""

import json

from absl import app, flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", "configs/quickstart.py", "Config file.")
_MAX_BATCHES = flags.DEFINE_integer("max_batches", 32, "Measured batches.", lower_bound=8)
_LEAK = flags.DEFINE_float("mb_per_step", 1.0, "What leaks, in millions of bytes.", lower_bound=0.1)

KINDS = ("nothing", "device arrays", "numpy arrays", "objects", "once")


def keeper(kind: str, num_bytes: int):
    """Returns what the loop calls at each step, and the bytes per step that it leaks."""
    import jax.numpy as jnp
    import numpy as np

    kept: list = []
    makers = {
        "nothing": lambda: None,
        "device arrays": lambda: jnp.ones([num_bytes], jnp.uint8),
        "numpy arrays": lambda: np.zeros([num_bytes], np.uint8),
        "objects": lambda: [bytes(100) for _ in range(num_bytes // 141)],  # 133 bytes an object, 8 in the list
        "once": lambda: np.ones([num_bytes], np.uint8) if len(kept) < 8 else None,
    }

    def on_step(batch, metrics):
        kept.append(makers[kind]())

    return on_step, num_bytes if kind in ("device arrays", "numpy arrays", "objects") else 0


def main(argv: list[str]) -> int:
    del argv
    from jepa_jax.tuning.measurement import measure
    from jepa_jax.tuning.settings import Combination, TrialRequest

    config = _CONFIG.value
    request = TrialRequest(config.to_dict(), Combination.of(config), max_batches=_MAX_BATCHES.value)
    results, passed = {}, True
    for kind in KINDS:
        on_step, true = keeper(kind, round(1e6 * _LEAK.value))
        figures = measure(request, on_step=on_step)
        slope = figures.memory_slope_bytes_per_step or 0.0
        ratio = slope / true if true else None
        good = not figures.leak if ratio is None else figures.leak and abs(ratio - 1) <= 0.2
        passed = passed and good
        results[kind] = {"leak": figures.leak, "bytes_per_step": round(slope), "slope_over_true": ratio}
        print(f"{kind:>14}: leak {figures.leak}, {slope / 1e6:.3f} MB per step", *figures.notes)
    print(json.dumps({**results, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    app.run(main)
