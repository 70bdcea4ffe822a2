"""Finds what slows an epoch down, what to change, and how much there is to gain."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from jepa_jax.profiling import monitor
from jepa_jax.profiling.epoch_record import EpochRecord
from jepa_jax.profiling.memory_growth import find_leak
from jepa_jax.profiling.sections import EpochSection, Section

# Shares above which something is a bottleneck.
DATA_WAIT = 0.30  # of the time of a batch
TRANSFER = 0.10  # of the time of a batch
DISPATCH = 0.10  # of the time of a batch
CHECKPOINT = 0.10  # of the epoch
VALIDATION = 0.40  # of the epoch
COMPUTE = 0.85  # of the time of a batch; a remark, not a warning
RAM = 0.85
GPU_MEMORY = 0.90
THROTTLED = 0.20  # of the samples
# A leak needs enough samples, and growth that is large enough to matter.
LEAK_SAMPLES, LEAK_PARTS = 16, 4
LEAK_GROWTH = 0.005  # of the available memory
NO_CONFIG = "own"  # pipeline of a loop that is not ours


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the advice depends on besides the measurements."""

    num_workers: int
    pipeline: str  # NO_CONFIG: advice then names no config keys
    cores: int
    platform: str  # of the devices: cpu, gpu, ...
    precision: str
    batch_size: int


@dataclasses.dataclass(frozen=True)
class Bottleneck:
    """`severity` is the share that is lost or full, 0 to 1; remarks (`warning` is False) ask for no change.

    `first`: no epoch before had it.
    """

    name: str
    severity: float
    message: str
    warning: bool = True
    first: bool = True


def find_bottlenecks(record: EpochRecord, setting: Setting, history: Sequence[monitor.Sample] = ()) -> list[Bottleneck]:
    """Returns everything above its threshold, worst first, then remarks; `history`: samples of the settled run."""
    found = [*_of_steps(record, setting), *_of_epoch(record), *_of_machine(record), *_leaks(history)]
    if setting.pipeline == NO_CONFIG:
        found = [dataclasses.replace(one, message=_without_keys(one)) for one in found]
    return sorted(found, key=lambda bottleneck: (not bottleneck.warning, -bottleneck.severity))


def _without_keys(bottleneck: Bottleneck) -> str:
    """Returns the message without advice that names config keys."""
    fact, _, advice = bottleneck.message.partition("; ")
    if not re.search(r"\b(data|train|eval|log)\.\w", advice):
        return bottleneck.message
    is_time = bottleneck.name in ("data_generation", "dispatch", "checkpoint", "validation")
    return f"{fact}; without it at most {gain(bottleneck.severity):.2f}x" if is_time else fact


def gain(share: float) -> float:
    """Returns how many times faster a run can get, at most, without something that takes this share of the time."""
    return 1 / max(1 - share, 1e-3)


def batch_share(record: EpochRecord, *sections: EpochSection) -> float:
    """Returns the share of sections in the time of batches, which excludes what happens between them."""
    return _share(sum(record.sections[section] for section in sections), record.loop_seconds())


def epoch_share(record: EpochRecord, *sections: EpochSection) -> float:
    return _share(sum(record.sections[section] for section in sections), record.seconds)


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


def _of_steps(record: EpochRecord, setting: Setting) -> Iterator[Bottleneck]:
    waiting = batch_share(record, EpochSection.DATA_WAIT)
    if waiting > DATA_WAIT:
        yield Bottleneck("data_generation", waiting, _data_advice(record, setting, waiting))
    copying = batch_share(record, EpochSection.DATA_TRANSFER)
    if copying > TRANSFER:
        share = epoch_share(record, EpochSection.DATA_TRANSFER)
        message = (
            f"transfer-bound: copying batches to the device is {100 * share:.0f} % of the epoch; "
            f"data.pipeline=device keeps the set there, data.prefetch hides more: at most {gain(share):.1f}x"
        )
        yield Bottleneck("transfer", copying, message)
    idle = sum(record.overheads[section] for section in (Section.DISPATCH, Section.LOGGING, Section.OTHER))
    lost = _share(idle, record.loop_seconds())
    if lost > DISPATCH:
        # Twice the batch halves the number of dispatches, and nothing else.
        message = (
            f"host-bound: the device idles {100 * lost:.0f} % of a batch while the host prepares the next step; "
            f"data.batch_size {setting.batch_size} -> {2 * setting.batch_size} (with its own learning rate) "
            f"at most {gain(lost / 2):.2f}x the speed, log.every_steps larger helps too"
        )
        yield Bottleneck("dispatch", lost, message)
    busy = _share(record.device_seconds, record.loop_seconds())
    if busy > COMPUTE:
        mfu = "" if record.mfu is None else f" at {100 * record.mfu:.0f} % MFU"
        change = "train.precision=bfloat16, " if setting.platform != "cpu" and setting.precision == "float32" else ""
        message = (
            f"compute-bound: the device is busy {100 * busy:.0f} % of a batch{mfu}; a faster loader gains at most "
            f"{gain(1 - busy):.2f}x, only {change}a smaller model or more devices gain more"
        )
        yield Bottleneck("compute", busy, message, warning=False)


def _data_advice(record: EpochRecord, setting: Setting, share: float) -> str:
    wait = epoch_share(record, EpochSection.DATA_WAIT)
    words = f"input-bound: data wait is {100 * wait:.0f} % of the epoch"
    if setting.pipeline == "device":
        return f"{words}, the filling of the device: later epochs have none"
    device = "data that fits in memory: data.pipeline=device"
    loaders = max(setting.num_workers, 1)  # without workers the prefetch thread loads
    if loaders >= setting.cores:
        fewer = f"; data.num_workers {loaders} -> {setting.cores} is enough" if loaders > setting.cores else ""
        cores = f"{setting.cores} core{'s' * (setting.cores != 1)}"
        return f"{words}, and the machine has only {cores}{fewer}; prepare smaller or decoded data; {device}"
    needed = math.ceil(loaders / (1 - min(share, 0.99)) - 1e-9)
    enough = max(min(needed, setting.cores), loaders + 1)
    faster = min(gain(wait), enough / loaders)
    advice = f"{words}; with data.num_workers {setting.num_workers} -> {enough} at most {faster:.1f}x"
    if enough < needed:
        cores = f"the machine has {setting.cores} cores: prepare smaller or decoded data"
        return f"{advice} ({needed} would feed the device, {cores})"
    if loaders == 1 and setting.cores <= 2:
        return f"{advice}; {device}"
    return advice


def _of_epoch(record: EpochRecord) -> Iterator[Bottleneck]:
    saving = epoch_share(record, EpochSection.CHECKPOINT)
    if saving > CHECKPOINT:
        message = (
            f"checkpoint-bound: saving is {100 * saving:.0f} % of the epoch; half as many "
            "(a larger train.checkpoint_every_epochs, or train.checkpoint_every_steps): "
            f"{gain(saving / 2):.2f}x, at most {gain(saving):.2f}x"
        )
        yield Bottleneck("checkpoint", saving, message)
    looking = epoch_share(record, EpochSection.VALIDATION_EPOCH, EpochSection.VISUALIZATION_GENERATION)
    if looking > VALIDATION:
        message = (
            f"evaluation-bound: validation and pictures are {100 * looking:.0f} % of the epoch; half as often "
            f"(eval.every_epochs, eval.knn_every_epochs): {gain(looking / 2):.2f}x, at most {gain(looking):.2f}x"
        )
        yield Bottleneck("validation", looking, message)
    if record.epoch > 1 and record.compilations:
        compiling = epoch_share(record, EpochSection.COMPILE)
        message = (
            f"recompiling: {record.compilations} compilations in epoch {record.epoch} took {100 * compiling:.0f} % of "
            f"it; keep the shapes of batches and evaluations the same: {gain(compiling):.2f}x"
        )
        yield Bottleneck("recompiling", compiling, message)


def _of_machine(record: EpochRecord) -> Iterator[Bottleneck]:
    used = record.system["ram_percent_max"]
    if used is not None and used > 100 * RAM:
        message = (
            f"memory-bound: {used:.0f} % of the RAM was in use; fewer data.num_workers or a smaller data.prefetch keep "
            "the run from being killed (a gain in safety, not in speed)"
        )
        yield Bottleneck("memory", used / 100, message)
    for index, gpu in enumerate(record.gpus):
        pressure, throttled = gpu["memory_pressure"], gpu["throttled"]
        if pressure is not None and pressure > GPU_MEMORY:
            message = (
                f"memory-bound: GPU {index} has used {100 * pressure:.0f} % of its {gpu['memory_limit_gb']:.1f} GiB; "
                "train.remat=full, a larger train.accum_steps or a smaller data.batch_size make room"
            )
            yield Bottleneck(f"gpu_{index}_memory", pressure, message)
        if throttled is not None and throttled > THROTTLED:
            clock, top = gpu["clock_mhz"], gpu["max_clock_mhz"]
            most = f": at most {top / clock:.2f}x" if clock and top else ""
            message = (
                f"throttled: GPU {index} was slowed down by heat or power {100 * throttled:.0f} % of the time "
                f"(clock {clock or 0:.0f} of {top or 0:.0f} MHz); cool it or raise its power limit{most}"
            )
            yield Bottleneck(f"gpu_{index}_throttled", throttled, message)


def _leaks(history: Sequence[monitor.Sample]) -> Iterator[Bottleneck]:
    host = [s for s in history if s["process_ram_gb"] is not None and s["ram_available_gb"] is not None]
    points = [(s["step"], s["process_ram_gb"], s["process_ram_gb"] + s["ram_available_gb"]) for s in host]
    yield from _leak("memory_leak", "the process", points)
    for index in range(max((len(sample["gpus"]) for sample in history), default=0)):
        gpus = [(s["step"], s["gpus"][index]) for s in history if index < len(s["gpus"])]
        points = [
            (step, gpu["allocated_gb"], gpu["allocator_limit_gb"])
            for step, gpu in gpus
            if gpu["allocated_gb"] is not None and gpu["allocator_limit_gb"]
        ]
        yield from _leak(f"gpu_{index}_leak", f"GPU {index}", points)


def _leak(name: str, where: str, points: Sequence[tuple[int, float, float]]) -> Iterator[Bottleneck]:
    """Looks for a leak in (step, used GB, limit in GB)."""
    if len({step for step, _, _ in points}) < LEAK_SAMPLES:
        return
    (first, _, _), (last, used, limit) = points[0], points[-1]
    material = LEAK_GROWTH * limit / (last - first)
    rate = find_leak([(step, used) for step, used, _ in points], material, LEAK_PARTS)
    if rate is not None:
        steps_left = (limit - used) / rate
        message = (
            f"leak: memory of {where} grows by {1024 * rate:.2f} MiB per step and is full in "
            f"{steps_left:,.0f} steps; look for arrays that are kept from step to step"
        )
        yield Bottleneck(name, min(1.0, 1000 / max(steps_left, 1.0)), message)
