"""MFU: operations per second of a step over the peak of this process's devices.

The peak of a GPU is in a table. That of a CPU is measured beside the run: what a core does per second of CPU time
depends on what its neighbours do, so a figure of another hour could be half of it, or twice.
"""

import time

import jax
import numpy as np
from threadpoolctl import threadpool_limits

from jepa_jax.base.processes import num_cores
from jepa_jax.runtime import hardware

MATRIX = 768  # rows of the square float32 product that is timed
REPEATS = 5
FEWEST_STEPS = 5  # that a time per step is known from


def mfu(flops_per_step: float | None, seconds_per_step: float | None, steps: int, peak: float | None) -> float | None:
    """Returns the share of the peak that matrix products and convolutions reach, 0 to 1; None if it is not known.

    Args:
      flops_per_step: operations of the step, without what `train.remat` computes again.
      seconds_per_step: mean time from step to step, waiting included.
      steps: of which that is the mean; a few say too little.
      peak: FLOP per second of all devices; a share above 1 of it shows that it is not the peak.
    """
    if not flops_per_step or not seconds_per_step or not peak or steps < FEWEST_STEPS:
        return None
    share = flops_per_step / seconds_per_step / peak
    return share if share <= 1 else None


def peak_flops(given_tflops: float, precision: str, num_devices: int | None = None) -> tuple[float | None, str]:
    """Returns FLOP per second of the devices together (None if unknown) and where the figure is from.

    Args:
      given_tflops: `profile.peak_tflops`, of one device; 0 = look it up.
      precision: `train.precision`, which a GPU's peak depends on.
      num_devices: how many take part; all by default. CPU devices share the cores, so their number does not matter.
    """
    num_devices = num_devices or jax.device_count()
    if given_tflops:
        return given_tflops * 1e12 * num_devices, "profile.peak_tflops"
    device = jax.devices()[0]
    if device.platform == "cpu":
        return num_cores() * measure_product(), "best float32 product measured beside this run, times the cores"
    limit = (device.memory_stats() or {}).get("bytes_limit")
    gpu = hardware.gpu_of_device(device.device_kind, limit, hardware.load_table())
    if gpu is None:
        return None, f"{device.device_kind} is not in the table of GPUs: set profile.peak_tflops for an MFU"
    return gpu.tflops(precision) * 1e12 * num_devices, f"{gpu.name}, {precision}"


def measure_product() -> float:
    """Returns FLOP per second of CPU time of one core: the fastest of a few products, which take 50 ms together."""
    matrix = np.ones([MATRIX, MATRIX], np.float32)
    result, seconds = np.empty_like(matrix), []
    with threadpool_limits(1):
        for _ in range(REPEATS + 1):  # the first one starts the library
            start = time.thread_time()
            np.dot(matrix, matrix, out=result)
            seconds.append(time.thread_time() - start)
    return 2 * MATRIX**3 / max(min(seconds), 1e-9)
