"""Names the metrics of an epoch, and writes what the terminal shows after it."""

import math
from collections.abc import Mapping

from jepa_jax.base.text import duration
from jepa_jax.profiling.accounting import percentages
from jepa_jax.profiling.bottlenecks import GPU_MEMORY, RAM, batch_share
from jepa_jax.profiling.epoch_record import EpochRecord
from jepa_jax.profiling.sections import EpochSection

GROUP = "profiling"
NAMED_PERCENT = 10  # of an epoch, from which the terminal names what takes them
TIMED_PER_STEP = (
    EpochSection.FORWARD_PASS,
    EpochSection.BACKWARD_PASS,
    EpochSection.OPTIMIZER_STEP,
    EpochSection.EMA_UPDATE,
)
TIMED_PER_EPOCH = (EpochSection.VALIDATION_EPOCH, EpochSection.VISUALIZATION_GENERATION)
BESIDES_STEP = (
    EpochSection.DATA_WAIT,
    EpochSection.DATA_TRANSFER,
    EpochSection.CHECKPOINT,
    EpochSection.COMPILE,
    *TIMED_PER_EPOCH,
)
LABELS = {
    EpochSection.FORWARD_PASS: "forward pass",
    EpochSection.BACKWARD_PASS: "backward pass",
    EpochSection.AUGMENT: "augmentation",
    EpochSection.OPTIMIZER_STEP: "optimizer",
    EpochSection.EMA_UPDATE: "EMA update",
    EpochSection.DATA_WAIT: "waiting for data",
    EpochSection.DATA_TRANSFER: "data transfer",
    EpochSection.VALIDATION_EPOCH: "validation",
    EpochSection.VISUALIZATION_GENERATION: "visualisation",
    EpochSection.CHECKPOINT: "checkpoint",
    EpochSection.COMPILE: "compilation",
    EpochSection.OTHER: "other / overhead",
}

Metrics = dict[str, float | None]


def epoch_metrics(record: EpochRecord) -> Metrics:
    """Returns all metrics without their group; None for what cannot be measured (no GPU, no trace, no peak)."""
    steps, batch, system = max(record.steps, 1), record.batch_seconds, record.system
    severities = {row["name"]: row["severity"] for row in record.bottlenecks}
    most = system["ram_percent_max"]
    metrics: Metrics = {
        "batch_time_avg": batch,
        "batch_time_std": record.batch_seconds_std,
        "batches_per_second": 1 / batch if batch else None,
        "epoch_total_time": record.seconds,
        "epoch_throughput_batches_per_hour": 3600 / batch if batch else None,
        "images_per_second": record.images_per_second,
        "mfu": record.mfu,
        "timing_data_transfer_avg": record.transfer_seconds,
        **{f"timing_{one}_avg": record.sections[one] / steps if record.split else None for one in TIMED_PER_STEP},
        **{f"timing_{section}_avg": record.sections[section] for section in TIMED_PER_EPOCH},
        **{f"epoch_{section}_percentage": value for section, value in percentages(record.sections).items()},
        "data_generation_time": record.generation_seconds,
        "data_transfer_time": record.transfer_seconds,
        "data_gen_percentage": 100 * batch_share(record, EpochSection.DATA_WAIT),
        "transfer_percentage": 100 * batch_share(record, EpochSection.DATA_TRANSFER),
        "bottleneck_data_generation": int("data_generation" in severities),
        "data_gen_bottleneck_severity": severities.get("data_generation", 0.0),
        "cpu_usage_percent": system["cpu_percent"],
        "process_cpu_percent": system["process_cpu_percent"],
        "ram_usage_percent": system["ram_percent"],
        "ram_available_gb": system["ram_available_gb"],
        "process_ram_gb": system["process_ram_gb"],
        "epoch_max_ram_usage": most,
        "bottleneck_memory": None if most is None else int(most > 100 * RAM),
        "memory_pressure": None if most is None else most / 100,
    }
    for index, gpu in enumerate(record.gpus or [{}]):  # without a GPU the names of the first are there, and empty
        metrics |= _gpu_metrics(f"gpu_{index}", gpu)
    return metrics | ({"images_per_joule": images_per_joule(record)} if record.gpus else {})


def images_per_joule(record: EpochRecord) -> float | None:
    """Returns the images of an epoch over the energy of all GPUs; None if one does not tell its energy."""
    energy = [gpu["energy_joules"] for gpu in record.gpus]
    joules = math.fsum(value for value in energy if value is not None)
    images = record.steps * (record.batch_seconds or 0.0) * (record.images_per_second or 0.0)
    return images / joules if joules and None not in energy else None


def _gpu_metrics(name: str, gpu: Mapping[str, float | None]) -> Metrics:
    pressure = gpu.get("memory_pressure")
    return {
        f"{name}_memory_allocated_gb": gpu.get("memory_gb"),
        f"{name}_memory_utilization": gpu.get("memory_percent"),
        f"epoch_max_{name}_memory": gpu.get("memory_max_gb"),
        f"bottleneck_{name}_memory": None if pressure is None else int(pressure > GPU_MEMORY),
        f"{name}_memory_pressure": pressure,
        f"{name}_utilization_percent": gpu.get("utilization"),
        f"{name}_temperature_c": gpu.get("temperature_c"),
        f"{name}_power_watts": gpu.get("power_watts"),
        f"{name}_energy_joules": gpu.get("energy_joules"),
        f"{name}_clock_mhz": gpu.get("clock_mhz"),
    }


def epoch_time(record: EpochRecord) -> str:
    """Returns the time of an epoch, and what took most of it besides the step if that is much, for the terminal."""
    share = {section: value for section, value in percentages(record.sections).items() if section in BESIDES_STEP}
    longest = max(share, key=share.__getitem__)
    named = f" ({LABELS[longest]} {share[longest]:.0f} %)" if share[longest] >= NAMED_PERCENT else ""
    return duration(record.seconds) + named


def _longest_first(record: EpochRecord) -> list[EpochSection]:
    named = [section for section in EpochSection if section != EpochSection.OTHER and record.sections[section] > 0]
    return sorted(named, key=lambda section: -record.sections[section])


def epoch_summary(record: EpochRecord) -> list[str]:
    """Returns a table for the terminal: totals, then the sections that took any time, longest first, other last."""
    batch = record.batch_seconds
    speed = "" if not batch else f"  {batch:.4f} s per batch  {3600 / batch:,.0f} batches/hour"
    images = "" if not record.images_per_second else f"  {record.images_per_second:,.0f} images/s"
    mfu = "" if record.mfu is None else f"  MFU {100 * record.mfu:.1f} %"
    lines = [f"time of epoch {record.epoch}: {record.seconds:.1f} s{speed}{images}{mfu}"]
    percent = percentages(record.sections)
    for section in [*_longest_first(record), EpochSection.OTHER]:
        untraced = section == EpochSection.OTHER and not record.split
        label = "step (no trace yet) / other" if untraced else LABELS[section]
        lines.append(f"  {label:<28} {percent[section]:5.1f} %  {record.sections[section]:9.3f} s")
    return lines
