"""The profiler's metric names, every one of them on every run, and the table that the terminal shows each epoch."""

from collections.abc import Mapping

from jepa_jax.profiling.accounting import SECTIONS
from jepa_jax.profiling.bottlenecks import GPU_MEMORY, RAM, batch_share
from jepa_jax.profiling.record import EpochRecord

GROUP = "profiling"
TIMED = ("forward_pass", "backward_pass", "optimizer_step", "ema_update")  # a step
LABELS = {
    "forward_pass": "forward pass",
    "backward_pass": "backward pass",
    "augment": "augmentation",
    "optimizer_step": "optimizer",
    "ema_update": "EMA update",
    "data_wait": "waiting for data",
    "data_transfer": "data transfer",
    "validation_epoch": "validation",
    "visualization_generation": "visualisation",
    "checkpoint": "checkpoint",
    "compile": "compilation",
    "other": "other / overhead",
}


def epoch_metrics(record: EpochRecord) -> dict[str, float | None]:
    """All names without their group; None where there is nothing to measure with (no GPU, no trace, no peak)."""
    steps = max(record.steps, 1)
    batch = record.batch_seconds
    metrics: dict[str, float | None] = {
        "batch_time_avg": batch,
        "batch_time_std": record.batch_seconds_std,
        "batches_per_second": 1 / batch if batch else None,
        "epoch_total_time": record.seconds,
        "epoch_throughput_batches_per_hour": 3600 / batch if batch else None,
        "images_per_second": record.images_per_second,
        "mfu": record.mfu,
        "timing_data_transfer_avg": record.transfer_seconds,
    }
    for name in TIMED:
        metrics[f"timing_{name}_avg"] = record.sections[name] / steps if record.split else None
    for name in ("validation_epoch", "visualization_generation"):  # once an epoch
        metrics[f"timing_{name}_avg"] = record.sections[name]
    metrics |= {f"epoch_{name}_percentage": value for name, value in record.percent().items()}
    return metrics | _data_metrics(record) | _memory_metrics(record)


def _data_metrics(record: EpochRecord) -> dict[str, float | None]:
    severities = {row["name"]: row["severity"] for row in record.bottlenecks}
    return {
        "data_generation_time": record.generation_seconds,
        "data_transfer_time": record.transfer_seconds,
        "data_gen_percentage": 100 * batch_share(record, "data_wait"),
        "transfer_percentage": 100 * batch_share(record, "data_transfer"),
        "bottleneck_data_generation": int("data_generation" in severities),
        "data_gen_bottleneck_severity": severities.get("data_generation", 0.0),
    }


def _memory_metrics(record: EpochRecord) -> dict[str, float | None]:
    system = record.system
    most = system["ram_percent_max"]
    metrics: dict[str, float | None] = {
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
    return metrics


def _gpu_metrics(name: str, gpu: Mapping[str, float | None]) -> dict[str, float | None]:
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
        f"{name}_clock_mhz": gpu.get("clock_mhz"),
    }


def epoch_summary(record: EpochRecord) -> list[str]:
    """Lines for the terminal: totals, then the sections that took any time, largest first, `other` last."""
    batch = record.batch_seconds
    speed = "" if not batch else f"  {batch:.4f} s a batch  {3600 / batch:,.0f} batches/hour"
    images = "" if not record.images_per_second else f"  {record.images_per_second:,.0f} img/s"
    mfu = "" if record.mfu is None else f"  MFU {100 * record.mfu:.1f} %"
    lines = [f"time of epoch {record.epoch}: {record.seconds:.1f} s{speed}{images}{mfu}"]
    percent = record.percent()
    order = sorted((name for name in SECTIONS if name != "other"), key=lambda name: -record.sections[name])
    for name in [*(name for name in order if record.sections[name] > 0), "other"]:
        label = LABELS[name] if name != "other" or record.split else "step (no trace yet) / other"
        lines.append(f"  {label:<28} {percent[name]:5.1f} %  {record.sections[name]:9.3f} s")
    return lines
