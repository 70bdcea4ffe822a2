"""What holds an epoch up, what to change, and how much there is to gain: pure functions of measured shares."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from jepa_jax.profiling import monitor
from jepa_jax.profiling.record import EpochRecord

# Shares above which something is a bottleneck.
DATA_WAIT = 0.30  # of the time of a batch
TRANSFER = 0.10  # of the time of a batch
DISPATCH = 0.10  # of the time of a batch
CHECKPOINT = 0.10  # of the epoch
VALIDATION = 0.40  # of the epoch
COMPUTE = 0.85  # of the time of a batch; says what the rest is not
RAM = 0.85
GPU_MEMORY = 0.90
THROTTLED = 0.20  # of the samples
# A leak: enough samples, growth that is clear against its own scatter, that goes on all the time and that matters.
LEAK_SAMPLES = 16
LEAK_SIGMAS = 6.0
LEAK_GROWTH = 0.005  # of the memory there is
LEAK_STEADY = 0.15  # of the growth, at least, from each quarter of the samples to the next


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the advice depends on besides the figures."""

    num_workers: int
    pipeline: str
    cores: int
    platform: str  # of the devices: cpu, gpu, ...
    precision: str
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """`severity` is the share that is lost or full, 0 to 1; only warnings ask for a change."""

    name: str
    severity: float
    message: str
    warning: bool = True


def find_bottlenecks(record: EpochRecord, setting: Setting, history: Sequence[monitor.Sample] = ()) -> list[Bottleneck]:
    """All that is above its threshold, worst first, then remarks; `history`: samples since the run has settled."""
    found = [
        *_data(record, setting),
        *_transfer(record, setting),
        *_dispatch(record, setting),
        *_checkpoint(record),
        *_validation(record),
        *_compute(record, setting),
        *_recompiling(record),
        *_memory(record),
        *_gpus(record),
        *_leaks(history),
    ]
    return sorted(found, key=lambda bottleneck: (not bottleneck.warning, -bottleneck.severity))


def gain(share: float) -> float:
    """How many times faster, at most, without something that takes this share of the time."""
    return 1 / max(1 - share, 1e-3)


def batch_share(record: EpochRecord, *sections: str) -> float:
    """Share of the time of batches, without what happens between them."""
    seconds = record.loop_seconds()
    return min(1.0, sum(record.sections[name] for name in sections) / seconds) if seconds > 0 else 0.0


def epoch_share(record: EpochRecord, *sections: str) -> float:
    return sum(record.sections[name] for name in sections) / record.seconds if record.seconds > 0 else 0.0


def _data(record: EpochRecord, setting: Setting) -> list[Bottleneck]:
    share, wait = batch_share(record, "data_wait"), epoch_share(record, "data_wait")
    if share <= DATA_WAIT:
        return []
    words = f"input-bound: data wait is {100 * wait:.0f} % of the epoch"
    if setting.pipeline == "device":
        return [Bottleneck("data_generation", share, f"{words}, the filling of the device: later epochs have none")]
    loaders = max(setting.num_workers, 1)  # without workers the prefetch thread loads
    needed = math.ceil(loaders / (1 - min(share, 0.99)) - 1e-9)
    enough = max(min(needed, setting.cores), loaders + 1)
    faster = min(gain(wait), enough / loaders)
    advice = f"with data.num_workers {setting.num_workers} -> {enough} at most {faster:.1f}x"
    if enough < needed:
        advice += (
            f" ({needed} would feed the device, the machine has {setting.cores} cores: prepare smaller or decoded data)"
        )
    elif loaders == 1 and setting.cores <= 2:
        advice += "; data that fits in memory: data.pipeline=device"
    return [Bottleneck("data_generation", share, f"{words}; {advice}")]


def _transfer(record: EpochRecord, setting: Setting) -> list[Bottleneck]:
    share = batch_share(record, "data_transfer")
    if share <= TRANSFER:
        return []
    wait = epoch_share(record, "data_transfer")
    message = (
        f"transfer-bound: copying batches to the device is {100 * wait:.0f} % of the epoch; "
        f"data.pipeline=device keeps the set there, data.prefetch hides more: at most {gain(wait):.1f}x"
    )
    return [Bottleneck("transfer", share, message)]


def _dispatch(record: EpochRecord, setting: Setting) -> list[Bottleneck]:
    seconds = record.loop_seconds()
    lost = record.overheads["dispatch"] + record.overheads["logging"] + record.overheads["other"]
    share = min(lost / seconds, 1.0) if seconds > 0 else 0.0
    if share <= DISPATCH:
        return []
    # Twice the batch halves the number of dispatches, and nothing else.
    message = (
        f"host-bound: the device idles {100 * share:.0f} % of a batch while the host prepares the next step; "
        f"data.batch_size {setting.batch_size} -> {2 * setting.batch_size} (with its own learning rate) "
        f"at most {gain(share / 2):.2f}x the images a second, log.every_steps larger helps too"
    )
    return [Bottleneck("dispatch", share, message)]


def _checkpoint(record: EpochRecord) -> list[Bottleneck]:
    share = epoch_share(record, "checkpoint")
    if share <= CHECKPOINT:
        return []
    message = (
        f"checkpoint-bound: saving is {100 * share:.0f} % of the epoch; half as many "
        f"(train.checkpoint_every_steps twice as large): {gain(share / 2):.2f}x, at most {gain(share):.2f}x"
    )
    return [Bottleneck("checkpoint", share, message)]


def _validation(record: EpochRecord) -> list[Bottleneck]:
    share = epoch_share(record, "validation_epoch", "visualization_generation")
    if share <= VALIDATION:
        return []
    message = (
        f"evaluation-bound: validation and pictures are {100 * share:.0f} % of the epoch; half as often "
        f"(eval.every_epochs, eval.knn_every_epochs): {gain(share / 2):.2f}x, at most {gain(share):.2f}x"
    )
    return [Bottleneck("validation", share, message)]


def _compute(record: EpochRecord, setting: Setting) -> list[Bottleneck]:
    seconds = record.loop_seconds()
    share = min(record.device_seconds / seconds, 1.0) if seconds > 0 else 0.0
    if share <= COMPUTE:
        return []
    mfu = "" if record.mfu is None else f" at {100 * record.mfu:.0f} % MFU"
    change = "train.precision=bfloat16, " if setting.platform != "cpu" and setting.precision == "float32" else ""
    message = (
        f"compute-bound: the device is busy {100 * share:.0f} % of a batch{mfu}; a faster loader gains at most "
        f"{gain(1 - share):.2f}x, only {change}a smaller model or more devices gain more"
    )
    return [Bottleneck("compute", share, message, warning=False)]


def _recompiling(record: EpochRecord) -> list[Bottleneck]:
    share = epoch_share(record, "compile")
    if record.epoch <= 1 or record.compilations == 0:
        return []
    message = (
        f"recompiling: {record.compilations} compilations in epoch {record.epoch} took {100 * share:.0f} % of it; "
        f"keep the shapes of batches and evaluations the same: {gain(share):.2f}x"
    )
    return [Bottleneck("recompiling", share, message)]


def _memory(record: EpochRecord) -> list[Bottleneck]:
    used = record.system["ram_percent_max"]
    if used is None or used <= 100 * RAM:
        return []
    message = (
        f"memory-bound: {used:.0f} % of the RAM was in use; fewer data.num_workers or a smaller data.prefetch keep "
        "the run from being killed (a gain in safety, not in speed)"
    )
    return [Bottleneck("memory", used / 100, message)]


def _gpus(record: EpochRecord) -> list[Bottleneck]:
    found = []
    for index, gpu in enumerate(record.gpus):
        pressure, throttled = gpu["memory_pressure"], gpu["throttled"]
        if pressure is not None and pressure > GPU_MEMORY:
            message = (
                f"memory-bound: GPU {index} has used {100 * pressure:.0f} % of its {gpu['memory_limit_gb']:.1f} GiB; "
                "train.remat=full, a larger train.accum_steps or a smaller data.batch_size make room"
            )
            found.append(Bottleneck(f"gpu_{index}_memory", pressure, message))
        if throttled is not None and throttled > THROTTLED:
            clock, top = gpu["clock_mhz"], gpu["max_clock_mhz"]
            most = f": at most {top / clock:.2f}x" if clock and top else ""
            message = (
                f"throttled: GPU {index} was slowed down by heat or power {100 * throttled:.0f} % of the time "
                f"(clock {clock or 0:.0f} of {top or 0:.0f} MHz); cool it or raise its power limit{most}"
            )
            found.append(Bottleneck(f"gpu_{index}_throttled", throttled, message))
    return found


@dataclasses.dataclass(frozen=True)
class Leak:
    gb_per_step: float
    steps_left: float


def find_leak(steps: Sequence[float], used_gb: Sequence[float], free_gb: float) -> Leak | None:
    """Memory that grows with the steps all the time; a jump (the first evaluation of a kind) or filling up is none."""
    if len(set(steps)) < LEAK_SAMPLES:
        return None
    rate, error = monitor.slope(steps, used_gb)
    growth = rate * (steps[-1] - steps[0])
    cuts = [len(steps) * i // 4 for i in range(5)]
    quarters = [statistics.median(used_gb[a:b]) for a, b in itertools.pairwise(cuts)]
    steady = all(b - a > LEAK_STEADY * growth for a, b in itertools.pairwise(quarters))
    if rate <= LEAK_SIGMAS * error or not steady or growth < LEAK_GROWTH * (used_gb[-1] + free_gb):
        return None
    return Leak(rate, free_gb / rate)


def _leaks(history: Sequence[monitor.Sample]) -> list[Bottleneck]:
    seen = list(history)
    found = []
    host = [s for s in seen if s["process_ram_gb"] is not None and s["ram_available_gb"] is not None]
    if host:
        used = [sample["process_ram_gb"] for sample in host]
        leak = find_leak([sample["step"] for sample in host], used, host[-1]["ram_available_gb"])
        found += _leak_message("memory_leak", "the process", leak)
    for index in range(max((len(sample["gpus"]) for sample in seen), default=0)):
        pairs = [(s["step"], s["gpus"][index]) for s in seen if index < len(s["gpus"])]
        pairs = [(step, gpu) for step, gpu in pairs if gpu["allocated_gb"] is not None and gpu["allocator_limit_gb"]]
        if pairs:
            used = [gpu["allocated_gb"] for _, gpu in pairs]
            free = pairs[-1][1]["allocator_limit_gb"] - used[-1]
            found += _leak_message(f"gpu_{index}_leak", f"GPU {index}", find_leak([s for s, _ in pairs], used, free))
    return found


def _leak_message(name: str, where: str, leak: Leak | None) -> list[Bottleneck]:
    if leak is None:
        return []
    message = (
        f"leak: memory of {where} grows by {1024 * leak.gb_per_step:.2f} MiB a step and is full in "
        f"{leak.steps_left:,.0f} steps; look for arrays that are kept from step to step"
    )
    return [Bottleneck(name, min(1.0, 1000 / max(leak.steps_left, 1.0)), message)]


def as_rows(bottlenecks: Sequence[Bottleneck]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(bottleneck) for bottleneck in bottlenecks]
