"""Estimates from a compiled step what a device must hold and how fast the step can be.

The memory of the compiled step is a lower bound: what only a real device decides (workspace of convolutions, CUDA's own
memory, buffers of collectives) is added as a margin of stated parts. Kernels run one after the other: the seconds of a
step are the sum of theirs (`factors.py`), their launches and the exchanges between devices.
"""

import dataclasses
from typing import Any

from jepa_jax.planning.absent_gpus import num_hosts
from jepa_jax.planning.factors import Prediction, predict
from jepa_jax.planning.step_compiler import Request, StepFacts

GIB = 2**30
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


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A compiled variant of a config on a GPU: what was changed, what it needs, how fast it can be."""

    request: Request
    label: str
    changes: dict[str, Any]  # config keys and their values, or {"gpu": key}
    facts: StepFacts
    need: MemoryNeed
    speed: Prediction
    unlimited: StepFacts | None = None  # of the program that never recomputes, if XLA recomputes in this one

    @property
    def unlimited_peak(self) -> int:
        """The peak if XLA kept everything; the same unless it recomputes."""
        return (self.unlimited or self.facts).peak_bytes

    @property
    def batch_size(self) -> int:
        return self.request.config.data.batch_size

    @property
    def capacity(self) -> int:
        return self.request.gpu.memory_bytes

    @property
    def verdict(self) -> str:
        return verdict_of(self.need.total, self.capacity)

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, if only just."""
        return self.verdict != NO


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


def exchange_seconds(facts: StepFacts, request: Request) -> float:
    """Returns the seconds in which a device sends what it has to, inside its host and between hosts."""
    sent = sum(wire for _, wire in facts.collectives.values())
    hosts = num_hosts(request.topology)
    inside = sent / (request.gpu.interconnect_gb_per_second * 1e9)
    # Between hosts only the part that a GPU holds after the sum inside its host is exchanged.
    outside = sent / (facts.devices // hosts) / (NETWORK_GB_PER_SECOND * 1e9) if hosts > 1 else 0.0
    return inside * (facts.devices > hosts) + outside


def predicted_speed(facts: StepFacts, request: Request) -> Prediction:
    """Returns the predicted seconds of a training step."""
    exchange = exchange_seconds(facts, request)
    return predict(facts.kernels, request.gpu, samples=request.config.data.batch_size, exchange_seconds=exchange)
