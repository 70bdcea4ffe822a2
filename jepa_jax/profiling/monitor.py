"""A thread that samples processor, memory and GPUs while a run goes on."""

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import psutil

from jepa_jax.runtime.gpus import GPU_FIELDS, Gpus, jax_gpus

# time, step, the HOST_FIELDS, and "gpus": for each GPU a dict of GPU_FIELDS and ALLOCATOR_FIELDS
Sample = dict[str, Any]
HOST_FIELDS = ("cpu_percent", "process_cpu_percent", "ram_percent", "ram_available_gb", "process_ram_gb")
ALLOCATOR_FIELDS = ("allocated_gb", "allocated_peak_gb", "allocator_limit_gb")
KEPT_SAMPLES = 600  # of a whole run; longer runs keep every second, fourth, ... sample


class Monitor:
    """Samples every `seconds` between `start` and `stop`; what it cannot read is None."""

    def __init__(self, seconds: float, *, gpus: Gpus | None = None, clock: Callable[[], float] = time.perf_counter):
        self._every, self._clock = seconds, clock
        self._step: Callable[[], int] = lambda: 0
        self._process = psutil.Process()
        self._devices = [device for device in jax.local_devices() if device.platform != "cpu"]
        self._gpus = jax_gpus(self._devices) if gpus is None else gpus
        self._began = clock()
        self._lock = threading.Lock()
        self._recent: list[Sample] = []
        self._history = History()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def gpu_problem(self) -> str:
        """The reason why there are no figures of GPUs, or ""."""
        if len(self._gpus):
            return ""
        return self._gpus.problem or "NVML finds no GPU"

    def start(self, step: Callable[[], int] | None = None) -> None:
        """Starts the thread; `step` returns the step that samples are labelled with."""
        self._step = step or self._step
        psutil.cpu_percent()  # a thread's first call only starts psutil's clock
        self._process.cpu_percent()
        if self._every > 0:
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread; `start` starts a new one."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.stop()
        self._gpus.close()

    def take(self) -> list[Sample]:
        """Returns the samples since the last call; at least one, taken now if necessary."""
        if not self._recent:
            self._sample()
        with self._lock:
            taken, self._recent = self._recent, []
        return taken

    def history(self) -> list[Sample]:
        """Returns samples of the whole run, evenly thinned out to at most KEPT_SAMPLES."""
        with self._lock:
            return list(self._history.samples)

    def _run(self) -> None:
        psutil.cpu_percent()
        while not self._ended.wait(self._every):
            self._sample()

    def _sample(self) -> None:
        gpus = join_gpus(self._gpus.read(), [allocator(device) for device in self._devices])
        sample = {"time": self._clock() - self._began, "step": self._step(), **self._read_host(), "gpus": gpus}
        with self._lock:
            self._recent.append(sample)
            self._history.add(sample)

    def _read_host(self) -> dict[str, float | None]:
        try:
            memory = psutil.virtual_memory()
            return {
                "cpu_percent": psutil.cpu_percent(),
                "process_cpu_percent": self._process.cpu_percent(),
                "ram_percent": memory.percent,
                "ram_available_gb": memory.available / 2**30,
                "process_ram_gb": self._process.memory_info().rss / 2**30,
            }
        except (psutil.Error, OSError):
            return dict.fromkeys(HOST_FIELDS)


class History:
    """Keeps at most KEPT_SAMPLES of an endless series, evenly spaced."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._seen, self._stride = 0, 1

    def add(self, sample: Sample) -> None:
        if self._seen % self._stride == 0:
            self.samples.append(sample)
        self._seen += 1
        if len(self.samples) > KEPT_SAMPLES:
            self.samples = self.samples[::2]
            self._stride *= 2


def allocator(device: Any) -> dict[str, float | None]:
    """Returns what JAX has allocated of a device's memory; `nvidia-smi` shows the whole pool instead."""
    stats = device.memory_stats() or {}
    bytes_of = zip(ALLOCATOR_FIELDS, ("bytes_in_use", "peak_bytes_in_use", "bytes_limit"), strict=True)
    return {field: stats[key] / 2**30 if key in stats else None for field, key in bytes_of}


def join_gpus(
    read: Sequence[Mapping[str, float | None]], allocated: Sequence[Mapping[str, float | None]]
) -> list[dict[str, float | None]]:
    """Returns one dict per GPU of what NVML and the allocator know; either may know fewer GPUs."""
    empty = dict.fromkeys((*GPU_FIELDS, *ALLOCATOR_FIELDS))
    unknown: Mapping[str, float | None] = {}
    return [{**empty, **one, **other} for one, other in itertools.zip_longest(read, allocated, fillvalue=unknown)]


def values(samples: Sequence[Mapping[str, Any]], field: str) -> list[float]:
    return [sample[field] for sample in samples if sample.get(field) is not None]


def mean(samples: Sequence[Mapping[str, Any]], field: str) -> float | None:
    found = values(samples, field)
    return statistics.fmean(found) if found else None


def latest(samples: Sequence[Mapping[str, Any]], field: str) -> float | None:
    found = values(samples, field)
    return found[-1] if found else None
