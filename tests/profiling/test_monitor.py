"""The sampler: what it reads, that it ends, and that a machine without NVML or a GPU is no error."""

import threading
import types

import pytest

from jepa_jax.profiling import monitor
from jepa_jax.profiling.epoch_record import gpu_figures, system_figures
from jepa_jax.profiling.monitor import KEPT_SAMPLES, History, Monitor
from jepa_jax.runtime.gpus import Gpus


class FakeNvml:
    """Two GPUs; one of them does not tell its power."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    def nvmlInit(self):
        pass

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        return ("GPU-a", "GPU-b").index(name)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if handle:
            raise RuntimeError("Not Supported")
        return 5_000_000  # mJ

    def nvmlDeviceGetMemoryInfo(self, handle):
        return types.SimpleNamespace(used=(6 + handle) * 2**30, total=24 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=97)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 71

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle:
            raise RuntimeError("Not Supported")
        return 350_000

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return 1800

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return 2520

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x40 if handle else 0x4  # too hot; at its power cap, which is no fault


def test_gpus_are_read_and_fields_that_one_does_not_know_are_empty():
    first, second = Gpus(FakeNvml(), {}).read()
    assert first["memory_used_gb"] == 6 and first["memory_total_gb"] == 24 and first["power_watts"] == 350
    assert (first["utilization"], first["temperature_c"], first["clock_mhz"]) == (97, 71, 1800)
    assert first["energy_joules"] == 5000 and second["energy_joules"] is None
    assert second["power_watts"] is None and (first["throttled"], second["throttled"]) == (0.0, 1.0)


@pytest.mark.parametrize("visible, memory", [("1", [7]), ("GPU-b,0", [7, 6]), ("", []), ("-1", [])])
def test_only_visible_gpus_count_in_their_order(visible, memory):
    gpus = Gpus(FakeNvml(), {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu["memory_used_gb"] for gpu in gpus.read()] == memory


def test_no_driver_is_no_error():
    class NoDriver(FakeNvml):
        def nvmlInit(self):
            raise RuntimeError("Driver Not Loaded")

    gpus = Gpus(NoDriver(), {})
    assert len(gpus) == 0 and gpus.read() == [] and "Driver Not Loaded" in gpus.problem
    assert Monitor(0.0, gpus=gpus).gpu_problem


class Steps:
    """Counts how often the monitor asks for the step, once per sample, and tells when it has asked often enough."""

    def __init__(self, enough):
        self._count, self._enough, self._reached = 0, enough, threading.Event()

    def __call__(self):
        self._count += 1
        if self._count > self._enough:
            self._reached.set()
        return self._count

    def wait(self):
        assert self._reached.wait(60)


def test_the_monitor_samples_in_the_background_and_ends():
    steps = Steps(3)
    watch = Monitor(0.001, gpus=Gpus(FakeNvml(), {}))
    watch.start(steps)
    steps.wait()
    samples = watch.take()
    watch.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "monitor"]
    assert [s["step"] for s in samples] == list(range(1, len(samples) + 1)) and len(samples) >= 3
    assert watch.history()[: len(samples)] == samples
    figures = system_figures(samples)
    assert 0 <= figures["ram_percent"] <= 100 and figures["process_ram_gb"] > 0 and figures["cpu_percent"] >= 0
    gpus = gpu_figures(samples, seconds=10.0)
    assert gpus[0]["memory_gb"] == 6 and gpus[1]["memory_percent"] == pytest.approx(100 * 7 / 24)


def test_without_a_thread_there_is_still_a_sample_an_epoch():
    watch = Monitor(0.0, gpus=Gpus(FakeNvml(), {"CUDA_VISIBLE_DEVICES": ""}))
    watch.start()
    assert len(watch.take()) == 1 and len(watch.take()) == 1
    watch.close()


def test_the_allocator_counts_before_nvidia_smi():
    """JAX takes most of a GPU at once; what it has given out says how full it is."""
    nvml = {"memory_used_gb": 22.0, "memory_total_gb": 24.0}
    allocator = {"allocated_gb": 8.0, "allocated_peak_gb": 10.0, "allocator_limit_gb": 20.0}
    (figures,) = gpu_figures([{"time": 0.0, "gpus": monitor.join_gpus([nvml], [allocator])}])
    assert figures["memory_gb"] == 8 and figures["memory_percent"] == 40 and figures["memory_pressure"] == 0.5
    (unknown,) = gpu_figures([{"time": 0.0, "gpus": monitor.join_gpus([nvml], [])}])
    assert unknown["memory_gb"] == 22 and unknown["memory_pressure"] is None  # the pool is full for JAX to use


def test_energy_is_counted_by_the_gpu_and_else_follows_from_its_power():
    def samples(**readings):
        rows = [dict(zip(readings, values, strict=True)) for values in zip(*readings.values(), strict=True)]
        return [{"time": 2.0 * i, "gpus": monitor.join_gpus([row], [])} for i, row in enumerate(rows)]

    (counted,) = gpu_figures(samples(energy_joules=[100.0, 700.0, 1300.0], power_watts=[10.0, 10.0, 10.0]), 20.0)
    assert counted["power_watts"] == pytest.approx(300) and counted["energy_joules"] == pytest.approx(6000)
    (read,) = gpu_figures(samples(energy_joules=[None, None], power_watts=[200.0, 300.0]), 20.0)
    assert read["power_watts"] == 250 and read["energy_joules"] == pytest.approx(5000)
    (reset,) = gpu_figures(samples(energy_joules=[1300.0, 5.0], power_watts=[200.0, 300.0]), 20.0)
    assert reset["energy_joules"] == pytest.approx(5000)
    (none,) = gpu_figures(samples(energy_joules=[None], power_watts=[None]), 20.0)
    assert none["energy_joules"] is None and none["power_watts"] is None


def test_a_long_run_keeps_evenly_spaced_samples():
    history = History()
    for i in range(10_000):
        history.add({"i": i})
    kept = [sample["i"] for sample in history.samples]
    assert KEPT_SAMPLES / 2 <= len(kept) <= KEPT_SAMPLES
    assert kept == list(range(0, kept[-1] + 1, kept[1]))


def test_the_first_sample_of_the_thread_counts_too(monkeypatch):
    known = threading.local()  # psutil keeps a clock for each thread, which its first call only starts

    def cpu_percent():
        started, known.started = getattr(known, "started", False), True
        return 42.0 if started else 0.0

    monkeypatch.setattr(monitor.psutil, "cpu_percent", cpu_percent)
    steps = Steps(1)
    sampler = Monitor(0.001, gpus=Gpus(types.SimpleNamespace()))
    sampler.start(steps)
    steps.wait()
    sampler.stop()
    assert sampler.take()[0]["cpu_percent"] == 42
