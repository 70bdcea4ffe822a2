"""Estimates what a device must hold, and how long it exchanges data with others; `factors.py` has kernels.

The memory of a compiled program is a lower bound: what only a real device decides (workspace of convolutions, CUDA's
own memory, buffers of collectives) is added as a margin of stated parts.
"""

import dataclasses

from jepa_jax.base.text import GIB
from jepa_jax.runtime.hardware import Gpu

CONTEXT_BYTES = 600 * 2**20  # CUDA's context, handles and kernels of cuBLAS and cuDNN
WORKSPACE_MOST_BYTES = GIB  # a convolution is assumed to need as much as it reads and writes, up to this
COLLECTIVE_BYTES = 512 * 2**20  # NCCL's buffers, with more than one device
FRAGMENTATION = 0.02  # of the peak: holes that the allocator cannot use
FITS_BELOW = 0.95  # of the memory; above it the verdict is "tight"
NETWORK_GB_PER_SECOND = 50.0  # of each GPU between hosts: 400 Gbit/s, an assumption

FITS, TIGHT, NO = "fits", "tight", "does not fit"


@dataclasses.dataclass(frozen=True)
class MemoryNeed:
    """Bytes that one device must hold: the step, the data beside it, and the parts of the margin."""

    peak: int
    data: int
    context: int
    workspace: int
    collectives: int
    fragmentation: int

    @property
    def margin(self) -> int:
        return self.context + self.workspace + self.collectives + self.fragmentation

    @property
    def total(self) -> int:
        return self.peak + self.data + self.margin

    @property
    def pool(self) -> int:
        """The part that comes from JAX's own allocator."""
        return self.total - self.context - self.collectives


def verdict_of(needed: int, capacity: int) -> str:
    """Returns FITS, TIGHT or NO."""
    if needed > capacity:
        return NO
    return FITS if needed <= FITS_BELOW * capacity else TIGHT


def memory_need(peak: int, largest_convolution: int, *, data: int = 0, devices: int = 1) -> MemoryNeed:
    """Returns the bytes that a device must hold; `largest_convolution` is what the largest one reads and writes."""
    return MemoryNeed(
        peak=peak,
        data=data,
        context=CONTEXT_BYTES,
        workspace=min(largest_convolution, WORKSPACE_MOST_BYTES),
        collectives=COLLECTIVE_BYTES if devices > 1 else 0,
        fragmentation=round(FRAGMENTATION * peak),
    )


def exchange_seconds(sent: int, gpu: Gpu, devices: int, hosts: int = 1) -> float:
    """Returns the seconds in which a device sends so many bytes, inside its host and between hosts."""
    inside = sent / (gpu.interconnect_gb_per_second * 1e9)
    # Between hosts only the part that a GPU holds after the sum inside its host is exchanged.
    outside = sent / (devices // hosts) / (NETWORK_GB_PER_SECOND * 1e9) if hosts > 1 else 0.0
    return inside * (devices > hosts) + outside
