"""Computes the figures of one epoch, as profile.json stores them."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.profiling import monitor
from jepa_jax.profiling.accounting import Spent, breakdown
from jepa_jax.profiling.sections import BETWEEN_STEPS, OVERHEADS, EpochSection, Phase, Section
from jepa_jax.profiling.speed import mfu

Shares = Mapping[Phase, float]  # of the device's time, by phase


@dataclasses.dataclass(frozen=True)
class Block:
    """A few consecutive steps: the unit of spread when two runs are compared."""

    steps: int
    spent: Spent
    batch_seconds: list[float]  # of each step, including the wait for its data


@dataclasses.dataclass
class Observed:
    """What has been seen of an epoch so far.

    Loaders work beside the loop: their seconds, summed over batches, are not part of its time.
    """

    blocks: list[Block] = dataclasses.field(default_factory=list)
    batch_seconds: list[float] = dataclasses.field(default_factory=list)  # of the steps after the last block
    loaded: int = 0  # batches
    generation: float = 0.0  # making or decoding batches, in whichever process
    supply: float = 0.0  # the prefetch thread waited for a batch in host memory
    transfer: float = 0.0  # copying batches to the device
    compilations: int = 0
    traced: bool = False  # whether a recording has split the device's time

    def add_batch(self, info: Mapping[str, Any]) -> None:
        self.loaded += 1
        self.generation += info["generation_seconds"]
        self.supply += info["supply_seconds"]
        self.transfer += info["transfer_seconds"]


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """One epoch; times in seconds."""

    epoch: int
    last_step: int
    steps: int
    seconds: float
    sections: dict[EpochSection, float]  # add up to `seconds`
    overheads: dict[str, float]  # the named parts of EpochSection.OTHER
    host: dict[Section, float]  # by host section, whether or not the device was idle
    device_seconds: float  # while the device computed steps
    traced: bool  # a trace of this epoch split the device's time (else the last trace did, if there was one)
    split: bool  # any trace split the device's time
    batch_seconds: float | None
    batch_seconds_std: float | None
    generation_seconds: float | None  # per batch
    transfer_seconds: float | None  # per batch
    images_per_second: float | None
    mfu: float | None  # 0 to 1
    compilations: int
    system: dict[str, float | None]
    gpus: list[dict[str, float | None]]
    blocks: list[dict[str, Any]]
    bottlenecks: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def loop_seconds(self) -> float:
        """Returns the time of the epoch without what happens between steps."""
        between = sum(self.sections[section] for section in BETWEEN_STEPS)
        return self.seconds - between - self.overheads[Section.PROFILER]


def make_record(
    seen: Observed,
    *,
    epoch: int,
    last_step: int,
    shares: Shares | None,
    batch_size: int,
    flops_per_step: float | None,
    peak_flops: float | None,
    samples: Sequence[monitor.Sample],
) -> EpochRecord:
    """Returns the record of an epoch; `peak_flops` is per second, of all devices together."""
    blocks = seen.blocks
    transfer_share = seen.transfer / ((seen.supply + seen.transfer) or 1.0)  # of the prefetch thread's time
    spent = sum((block.spent for block in blocks), Spent())
    batch_times = [seconds for block in blocks for seconds in block.batch_seconds]
    batch = statistics.fmean(batch_times) if batch_times else None
    rows = []
    for block in blocks:
        if block.steps:
            sections = breakdown(block.spent, shares, transfer_share)
            seconds = {section: round(value / block.steps, 9) for section, value in sections.items()}
            rows.append(
                {"steps": block.steps, "batch_seconds": statistics.fmean(block.batch_seconds), "sections": seconds}
            )
    unattributed = spent.device * (1.0 if shares is None else shares.get(Phase.OTHER, 0.0))
    return EpochRecord(
        epoch=epoch,
        last_step=last_step,
        steps=sum(block.steps for block in blocks),
        seconds=spent.seconds,
        sections=breakdown(spent, shares, transfer_share),
        overheads={"unattributed_device": unattributed} | {name: spent.exposed.get(name, 0.0) for name in OVERHEADS},
        host={section: round(value, 6) for section, value in spent.host.items()},
        device_seconds=spent.device,
        traced=seen.traced,
        split=shares is not None,
        batch_seconds=batch,
        batch_seconds_std=statistics.pstdev(batch_times) if batch_times else None,
        generation_seconds=seen.generation / seen.loaded if seen.loaded else None,
        transfer_seconds=seen.transfer / seen.loaded if seen.loaded else None,
        images_per_second=batch_size / batch if batch else None,
        mfu=mfu(flops_per_step, batch, len(batch_times), peak_flops),
        compilations=seen.compilations,
        system=system_figures(samples),
        gpus=gpu_figures(samples, spent.seconds),
        blocks=rows,
    )


def system_figures(samples: Sequence[monitor.Sample]) -> dict[str, float | None]:
    return {
        "cpu_percent": monitor.mean(samples, "cpu_percent"),
        "process_cpu_percent": monitor.mean(samples, "process_cpu_percent"),
        "ram_percent": monitor.mean(samples, "ram_percent"),
        "ram_percent_max": max(monitor.values(samples, "ram_percent"), default=None),
        "ram_available_gb": monitor.latest(samples, "ram_available_gb"),
        "process_ram_gb": monitor.latest(samples, "process_ram_gb"),
    }


def gpu_figures(samples: Sequence[monitor.Sample], seconds: float | None = None) -> list[dict[str, float | None]]:
    """Returns the figures of each GPU over an epoch of this length; memory is the allocator's if known, else NVML's.

    NVML's includes the pool that JAX holds but does not use, so it says nothing about how full that is. Energy is the
    mean power times the epoch's length.
    """
    figures = []
    for index in range(max((len(sample["gpus"]) for sample in samples), default=0)):
        present = [sample for sample in samples if index < len(sample["gpus"])]
        seen = [sample["gpus"][index] for sample in present]
        allocated = bool(monitor.values(seen, "allocated_gb"))
        used, limit = ("allocated_gb", "allocator_limit_gb") if allocated else ("memory_used_gb", "memory_total_gb")
        peak = max(monitor.values(seen, "allocated_peak_gb"), default=None)
        size, now = monitor.latest(seen, limit), monitor.mean(seen, used)
        watts = mean_power(seen, [sample["time"] for sample in present])
        means = ("utilization", "temperature_c", "clock_mhz", "throttled")
        figures.append(
            {
                "memory_gb": now,
                "memory_max_gb": max(monitor.values(seen, used), default=None),
                "memory_limit_gb": size,
                "memory_percent": 100 * now / size if now is not None and size else None,
                "memory_pressure": min(peak / size, 1.0) if allocated and peak is not None and size else None,
                "power_watts": watts,
                "energy_joules": watts * seconds if watts is not None and seconds is not None else None,
                **{name: monitor.mean(seen, name) for name in means},
                "max_clock_mhz": monitor.latest(seen, "max_clock_mhz"),
            }
        )
    return figures


def mean_power(seen: Sequence[Mapping[str, float | None]], times: Sequence[float]) -> float | None:
    """Returns watts from the first to the last sample by NVML's counter of energy, else the mean of its readings."""
    counted = [(at, one["energy_joules"]) for at, one in zip(times, seen, strict=True) if one.get("energy_joules")]
    if len(counted) > 1:
        (first, before), (last, after) = counted[0], counted[-1]
        if last > first and before is not None and after is not None and after >= before:  # a reset driver starts at 0
            return (after - before) / (last - first)
    return monitor.mean(seen, "power_watts")
