"""Limits the memory that this process may ask for: to leave room for others, and to try what running out is like."""

import contextlib
import resource
from collections.abc import Iterator

HEADROOM_BYTES = 2**28  # that `run_out` leaves, for messages to be written


@contextlib.contextmanager
def limited(num_bytes: int | None) -> Iterator[None]:
    """So much address space and no more; afterwards as before, so that the end can still be reported."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if num_bytes is not None:
            set_limit(num_bytes)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def set_limit(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard), hard)
    )


def run_out() -> None:
    """Limits the address space to little more than is used, and asks XLA for more than that."""
    import jax
    import numpy as np
    import psutil

    set_limit(psutil.Process().memory_info().vms + HEADROOM_BYTES)
    on_device = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    jax.block_until_ready(jax.numpy.ones([max(4 * HEADROOM_BYTES, *on_device) * 2], np.uint8))
