"""The figures of one epoch, as profile.json keeps them."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from jepa_jax.profiling import monitor
from jepa_jax.profiling.accounting import OVERHEADS, SECTIONS, Spent, breakdown, percentages


@dataclasses.dataclass(frozen=True)
class Block:
    """A few steps in a row: the unit of spread when two runs are compared."""

    steps: int
    spent: Spent
    batch_seconds: list[float]  # of each step, the wait for its data included


@dataclasses.dataclass(frozen=True)
class Loading:
    """What loaders report, summed over batches; it happens beside the loop and is no part of its time."""

    batches: int = 0
    generation: float = 0.0  # making or decoding batches, in whichever process
    supply: float = 0.0  # what the prefetch thread waited for a batch in host memory
    transfer: float = 0.0  # copying batches to the device

    def plus(self, info: dict[str, Any]) -> "Loading":
        return Loading(
            self.batches + 1,
            self.generation + info["generation_seconds"],
            self.supply + info["supply_seconds"],
            self.transfer + info["transfer_seconds"],
        )

    def transfer_share(self) -> float:
        """The part of the prefetch thread's time that goes into copying."""
        together = self.supply + self.transfer
        return self.transfer / together if together > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """One epoch; seconds unless a name says otherwise."""

    epoch: int
    last_step: int
    steps: int
    seconds: float
    sections: dict[str, float]  # adds up to `seconds`
    overheads: dict[str, float]  # the named parts of `other`
    host: dict[str, float]  # exclusive host sections, also what the device hid
    device_seconds: float  # the device was computing steps
    traced: bool  # whether the device's time was split by a trace of this epoch (else by the last one, if any)
    split: bool  # whether it could be split at all
    batch_seconds: float | None
    batch_seconds_std: float | None
    generation_seconds: float | None  # a batch
    transfer_seconds: float | None  # a batch
    images_per_second: float | None
    mfu: float | None  # 0 to 1
    compilations: int
    system: dict[str, float | None]
    gpus: list[dict[str, float | None]]
    blocks: list[dict[str, Any]]
    bottlenecks: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def percent(self) -> dict[str, float]:
        return percentages(self.sections)

    def loop_seconds(self) -> float:
        """Without what happens between steps."""
        between = ("validation_epoch", "visualization_generation", "checkpoint", "compile")
        return self.seconds - sum(self.sections[name] for name in between) - self.overheads["profiler"]


def make_record(
    *,
    epoch: int,
    last_step: int,
    blocks: Sequence[Block],
    shares: dict[str, float] | None,
    traced: bool,
    loading: Loading,
    counts: dict[str, int],
    batch_size: int,
    flops_per_step: float | None,
    peak_flops: float | None,
    samples: Sequence[monitor.Sample],
) -> EpochRecord:
    """Puts an epoch together from its blocks and what was seen beside them; peak_flops: a second, of all devices."""
    spent = sum((block.spent for block in blocks), Spent())
    steps = sum(block.steps for block in blocks)
    batch_times = [seconds for block in blocks for seconds in block.batch_seconds]
    transfer_share = loading.transfer_share()
    batch = statistics.fmean(batch_times) if batch_times else None
    flop_rate = flops_per_step / batch if flops_per_step and batch else None
    return EpochRecord(
        epoch=epoch,
        last_step=last_step,
        steps=steps,
        seconds=spent.seconds,
        sections=breakdown(spent, shares, transfer_share),
        overheads=_overheads(spent, shares),
        host={name: round(value, 6) for name, value in spent.host.items()},
        device_seconds=spent.device,
        traced=traced,
        split=shares is not None,
        batch_seconds=batch,
        batch_seconds_std=statistics.pstdev(batch_times) if batch_times else None,
        generation_seconds=loading.generation / loading.batches if loading.batches else None,
        transfer_seconds=loading.transfer / loading.batches if loading.batches else None,
        images_per_second=batch_size / batch if batch else None,
        mfu=flop_rate / peak_flops if flop_rate and peak_flops else None,
        compilations=counts.get("compilation", 0),
        system=system_figures(samples),
        gpus=gpu_figures(samples),
        blocks=[_block_row(block, shares, transfer_share) for block in blocks if block.steps],
    )


def _overheads(spent: Spent, shares: dict[str, float] | None) -> dict[str, float]:
    device = {"unattributed_device": spent.device * (1.0 if shares is None else shares.get("other", 0.0))}
    return device | {name: spent.exposed.get(name, 0.0) for name in OVERHEADS}


def _block_row(block: Block, shares: dict[str, float] | None, transfer_share: float) -> dict[str, Any]:
    sections = breakdown(block.spent, shares, transfer_share)
    seconds = {name: round(sections[name] / block.steps, 9) for name in SECTIONS}
    return {"steps": block.steps, "batch_seconds": statistics.fmean(block.batch_seconds), "sections": seconds}


def system_figures(samples: Sequence[monitor.Sample]) -> dict[str, float | None]:
    return {
        "cpu_percent": monitor.mean(samples, "cpu_percent"),
        "process_cpu_percent": monitor.mean(samples, "process_cpu_percent"),
        "ram_percent": monitor.mean(samples, "ram_percent"),
        "ram_percent_max": monitor.largest(samples, "ram_percent"),
        "ram_available_gb": monitor.latest(samples, "ram_available_gb"),
        "process_ram_gb": monitor.latest(samples, "process_ram_gb"),
    }


def gpu_figures(samples: Sequence[monitor.Sample]) -> list[dict[str, float | None]]:
    """Of each GPU over an epoch; memory is the allocator's where it tells, else NVML's."""
    figures = []
    for index in range(max((len(sample["gpus"]) for sample in samples), default=0)):
        seen = monitor.gpu_samples(samples, index)
        allocated = bool(monitor.values(seen, "allocated_gb"))
        used, limit = ("allocated_gb", "allocator_limit_gb") if allocated else ("memory_used_gb", "memory_total_gb")
        peak = monitor.largest(seen, "allocated_peak_gb") if allocated else monitor.largest(seen, used)
        size = monitor.latest(seen, limit)
        now = monitor.mean(seen, used)
        figures.append(
            {
                "memory_gb": now,
                "memory_max_gb": monitor.largest(seen, used),
                "memory_limit_gb": size,
                "memory_percent": 100 * now / size if now is not None and size else None,
                "memory_pressure": min(peak / size, 1.0) if peak is not None and size else None,
                **{
                    name: monitor.mean(seen, name)
                    for name in ("utilization", "temperature_c", "power_watts", "clock_mhz", "throttled")
                },
                "max_clock_mhz": monitor.latest(seen, "max_clock_mhz"),
            }
        )
    return figures
