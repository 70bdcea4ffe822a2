"""Measures the rate of a config's loader on this machine, for a plan."""

import time
from collections.abc import Callable
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.data.pipeline import batches_ready, train_batches
from jepa_jax.data.sources import open_source

MEASURED_SECONDS = 1.0


def measure_loader(config: Any, clock: Callable[[], float] = time.perf_counter) -> tuple[float | None, str]:
    """Images a second that this machine's loader delivers for a config, or why there is no such rate."""
    import jax

    from jepa_jax.runtime.mesh import batch_sharding, make_mesh

    if config.data.pipeline == "device":
        return None, "no loader"
    try:
        source = open_source(config.data, "train")
    except UserError:
        return None, "the data is not there"
    sharding = batch_sharding(make_mesh(1, 1, jax.devices()[:1]))
    try:
        with train_batches(config.data, source, seed=0, sharding=sharding) as batches:
            for _ in range(1 + batches_ready(config.data)):  # workers start, files open; what waits was made before
                jax.block_until_ready(next(batches)[0])
            started, images = clock(), 0
            while clock() - started < MEASURED_SECONDS:
                jax.block_until_ready(next(batches)[0])
                images += config.data.batch_size
            return images / (clock() - started), ""
    except UserError as error:  # the plan itself does not need the data
        return None, str(error)
