"""Peak FLOP per second of this process's devices, for the MFU: from a table for GPUs, measured for CPUs."""

import json
import pathlib
import time

import jax
import jax.numpy as jnp

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_json
from jepa_jax.base.processes import num_cores
from jepa_jax.runtime import hardware
from jepa_jax.runtime.provenance import processor
from jepa_jax.runtime.start import cache_folder

MATRIX = 1024  # rows of the square float32 product that is timed
REPEATS = 5


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
        return measured_cpu_flops(cache_folder() / "cpu_peak.json"), "best float32 product measured on this machine"
    limit = (device.memory_stats() or {}).get("bytes_limit")
    gpu = hardware.gpu_of_device(device.device_kind, limit, hardware.load_table())
    if gpu is None:
        return None, f"{device.device_kind} is not in the table of GPUs: set profile.peak_tflops for an MFU"
    return gpu.tflops(precision) * 1e12 * num_devices, f"{gpu.name}, {precision}"


def measured_cpu_flops(path: pathlib.Path) -> float:
    """Returns the peak of this process's cores; measured once (0.3 s) and stored in `path`."""
    machine = f"{processor()}, {num_cores()} cores"
    try:
        known = json.loads(path.read_text())
        return float(known[machine])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    flops = num_cores() * measure_product()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, known | {machine: flops})
    except (OSError, UserError):
        pass  # a read-only home costs a measurement, not the run
    return flops


def measure_product() -> float:
    """Returns FLOP per second of CPU time, so undisturbed by other processes, of the fastest of a few products."""
    product = jax.jit(jnp.dot)
    matrix = jnp.ones([MATRIX, MATRIX], jnp.float32)
    product(matrix, matrix).block_until_ready()
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        product(matrix, matrix).block_until_ready()
        seconds.append(time.process_time() - start)
    return 2 * MATRIX**3 / min(seconds)
