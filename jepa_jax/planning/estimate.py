"""Estimates what a device must hold, and how long it exchanges data with others; `factors.py` has kernels.

The memory of a compiled program is a lower bound: what only a real device decides is added as a margin of stated parts.
All of it comes from the pool that JAX takes of the device; CUDA and NCCL have the rest (`runtime/allocator.py`).
"""

import dataclasses

from jepa_jax.base.text import GIB
from jepa_jax.runtime.hardware import Gpu

WORKSPACE_MOST_BYTES = GIB  # a convolution is assumed to need as much as it reads and writes, up to this
FRAGMENTATION = 0.02  # of the peak: holes that the allocator cannot use
FITS_BELOW = 0.95  # of the pool; above it the verdict is "tight"
NETWORK_GB_PER_SECOND = 50.0  # of each GPU between hosts: 400 Gbit/s, an assumption

FITS, TIGHT, NO = "fits", "tight", "does not fit"


@dataclasses.dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one device's pool must hold: the step, the data beside it, and the parts of the margin."""

    peak: int
    data: int
    workspace: int
    fragmentation: int

    @property
    def margin(self) -> int:
        return self.workspace + self.fragmentation

    @property
    def total(self) -> int:
        return self.peak + self.data + self.margin


def verdict_of(needed: int, capacity: int) -> str:
    """Returns FITS, TIGHT or NO."""
    if needed > capacity:
        return NO
    return FITS if needed <= FITS_BELOW * capacity else TIGHT


def memory_need(peak: int, largest_convolution: int, *, data: int = 0) -> MemoryNeed:
    """Returns the bytes that a device must hold; `largest_convolution` is what the largest one reads and writes."""
    return MemoryNeed(
        peak=peak,
        data=data,
        workspace=min(largest_convolution, WORKSPACE_MOST_BYTES),
        fragmentation=round(FRAGMENTATION * peak),
    )


def exchange_seconds(sent: int, gpu: Gpu, devices: int, hosts: int = 1) -> float:
    """Returns the seconds in which a device sends so many bytes, inside its host and between hosts."""
    inside = sent / (gpu.interconnect_gb_per_second * 1e9)
    # Between hosts only the part that a GPU holds after the sum inside its host is exchanged.
    outside = sent / (devices // hosts) / (NETWORK_GB_PER_SECOND * 1e9) if hosts > 1 else 0.0
    return inside * (devices > hosts) + outside
