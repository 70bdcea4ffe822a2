"""Estimates from a compiled step what a device must hold and how fast the step can be.

The memory of the compiled step is a lower bound: what only a real device decides (workspace of convolutions, CUDA's own
memory, buffers of collectives) is added as a margin of stated parts. Speed is a roofline bound: the larger of the time
of the products at the GPU's peak rate and the time of the bytes at its bandwidth, if every kernel reads and writes
memory and nothing stays in the cache.
"""

import dataclasses
from typing import Any

from jepa_jax.config.groups import Config
from jepa_jax.planning.step_compiler import Request
from jepa_jax.planning.step_facts import StepFacts

GIB = 2**30
CONTEXT_BYTES = 600 * 2**20  # CUDA's context, handles and kernels of cuBLAS and cuDNN
WORKSPACE_MOST_BYTES = GIB  # a convolution is assumed to need as much as it reads and writes, up to this
COLLECTIVE_BYTES = 512 * 2**20  # NCCL's buffers, with more than one device
FRAGMENTATION = 0.02  # of the peak: holes that the allocator cannot use
FITS_BELOW = 0.95  # of the memory; above it the verdict is "tight"
EFFICIENCY = (0.3, 0.7)  # of the bound: an assumption about what training programs reach

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
class SpeedBound:
    """Seconds that a step takes at least, by what limits it."""

    batch_size: int
    compute_seconds: float
    memory_seconds: float
    network_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds)

    @property
    def images_per_sec(self) -> float:
        return self.batch_size / self.seconds

    @property
    def predicted(self) -> tuple[float, float]:
        """Images per second, from and to: the bound times EFFICIENCY."""
        return self.images_per_sec * EFFICIENCY[0], self.images_per_sec * EFFICIENCY[1]

    @property
    def limit(self) -> str:
        parts = {"compute": self.compute_seconds, "memory bandwidth": self.memory_seconds}
        parts["network"] = self.network_seconds
        return max(parts, key=lambda name: parts[name])


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A compiled variant of a config on a GPU: what was changed, what it needs, how fast it can be."""

    request: Request
    label: str
    changes: dict[str, Any]  # config keys and their values, or {"gpu": key}
    facts: StepFacts
    need: MemoryNeed
    speed: SpeedBound

    @property
    def batch_size(self) -> int:
        return self.request.config.data.batch_size

    @property
    def capacity(self) -> int:
        return self.request.gpu.memory_bytes

    @property
    def verdict(self) -> str:
        if self.need.total > self.capacity:
            return NO
        return FITS if self.need.total <= FITS_BELOW * self.capacity else TIGHT

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, if only just."""
        return self.verdict != NO


def memory_need(facts: StepFacts, config: Config, data_bytes: int = 0) -> MemoryNeed:
    """Returns what a device must hold; `data_bytes` is the size of the data set, for those that stay on the device."""
    waiting = facts.batch_bytes * (config.data.prefetch + 1)  # the loader's thread holds one more
    return MemoryNeed(
        peak=facts.peak_bytes,
        data=data_bytes if config.data.pipeline == "device" else waiting,
        context=CONTEXT_BYTES,
        workspace=min(facts.largest_convolution_bytes, WORKSPACE_MOST_BYTES),
        collectives=COLLECTIVE_BYTES if facts.devices > 1 else 0,
        fragmentation=round(FRAGMENTATION * facts.peak_bytes),
    )


def speed_bound(facts: StepFacts, request: Request) -> SpeedBound:
    """Returns the roofline bound of a step."""
    config, gpu = request.config, request.gpu
    sent = sum(wire for _, wire in facts.collectives.values())
    return SpeedBound(
        batch_size=config.data.batch_size,
        compute_seconds=facts.flops / facts.devices / (gpu.tflops(config.train.precision) * 1e12),
        memory_seconds=facts.bytes_moved / (gpu.bandwidth_gb_per_second * 1e9),
        network_seconds=sent / (gpu.interconnect_gb_per_second * 1e9),
    )
