"""Identity: which card this is, and the rates that its memory, products, bus and links reach."""

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jepa_jax.device_check.findings import Findings
from jepa_jax.models.kernels.conv import conv2d
from jepa_jax.runtime.gpus import THROTTLED, ask, jax_gpus
from jepa_jax.runtime.hardware import Gpu, gpu_of_device, load_table
from jepa_jax.runtime.mesh import make_mesh

SHARE = (0.3, 1.15)  # of the rates in the table, that a healthy card reaches
MEASURED_SECONDS = 0.3
TIMES = 5  # measurements, of which the fastest counts
# Sizes with which a GPU is busy for milliseconds, and a CPU not much longer.
COPY_BYTES = {"gpu": 2**28, "cpu": 2**24}
PRODUCT_SIZE = {"gpu": 8192, "cpu": 512}
IMAGES = {"gpu": 256, "cpu": 2}


def seconds_of(run: Callable[[], Any]) -> float:
    """Returns the seconds of one call that starts work on a device: the fastest of several measurements."""
    jax.block_until_ready(run())  # compiles
    began = time.perf_counter()
    jax.block_until_ready(run())
    calls = max(1, round(MEASURED_SECONDS / TIMES / (time.perf_counter() - began)))
    measured = []
    for _ in range(TIMES):
        began = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        measured.append((time.perf_counter() - began) / calls)
    return min(measured)


def measure_rates(device: Any) -> dict[str, float]:
    """Returns GB/s of copies on the device and to it, and TFLOP/s of products and of 3 x 3 convolutions."""
    kind = device.platform
    with jax.default_device(device):
        numbers = jnp.ones(COPY_BYTES[kind] // 4, jnp.float32)
        add = jax.jit(lambda x: x + 1)
        rates = {"copy_gb_per_second": 2 * numbers.nbytes / seconds_of(lambda: add(numbers)) / 1e9}
        size = PRODUCT_SIZE[kind]
        for name, dtype in (("bf16", jnp.bfloat16), ("tf32", jnp.float32)):
            x = jnp.ones((size, size), dtype)
            rates[f"{name}_tflops"] = 2 * size**3 / seconds_of(functools.partial(_product, x, x)) / 1e12
        x, kernel = jnp.ones((IMAGES[kind], 56, 56, 64), jnp.bfloat16), jnp.ones((3, 3, 64, 64), jnp.bfloat16)
        flops = 2 * x.size * 9 * 64
        rates["convolution_tflops"] = flops / seconds_of(lambda: _convolution(x, kernel)) / 1e12
        host = np.ones(COPY_BYTES[kind] // 8, np.float32)
        rates["to_device_gb_per_second"] = host.nbytes / seconds_of(lambda: jax.device_put(host, device)) / 1e9
    return rates


_product = jax.jit(jnp.matmul)
_convolution = jax.jit(lambda x, kernel: conv2d(x, kernel, padding=1))


def all_reduce_rate(devices: list[Any]) -> float:
    """Returns GB/s that each device sends while numbers are summed over all of them in a ring."""
    mesh = make_mesh(-1, 1, devices)
    total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    part = COPY_BYTES[devices[0].platform] // 4
    numbers = jax.device_put(np.ones(part * len(devices) // 4, np.float32), jax.NamedSharding(mesh, P("data")))
    summed = jax.jit(total)
    sent = 2 * (len(devices) - 1) / len(devices) * part
    return sent / seconds_of(lambda: summed(numbers)) / 1e9


def identify(devices: list[Any], nvml: Any = None) -> dict[str, Any]:
    """Returns name, driver, versions, clocks and memory of the first device; `nvml` as in `runtime.gpus.Gpus`."""
    device = devices[0]
    facts: dict[str, Any] = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
    facts |= {"devices": len(devices), "pool_bytes": (device.memory_stats() or {}).get("bytes_limit")}
    if device.platform == "cpu":
        return facts
    gpus = jax_gpus(devices, nvml)
    nvml = nvml or importlib.import_module("pynvml")
    readings = gpus.read()[0] if len(gpus) else {}
    version = ask(nvml, "nvmlSystemGetCudaDriverVersion")
    facts |= {
        "driver": ask(nvml, "nvmlSystemGetDriverVersion"),
        "cuda": version and f"{version // 1000}.{version % 1000 // 10}",
        "cudnn": _cudnn_version(),
        "capability": str(device.compute_capability),
        **{name: readings.get(name) for name in ("clock_mhz", "max_clock_mhz", "memory_total_gb", "throttled")},
    }
    gpus.close()
    return facts


def _cudnn_version() -> int | None:
    from jax._src.lib import cuda_versions  # JAX has no public name for it

    return ask(cuda_versions, "cudnn_get_version")


def check_rates(rates: dict[str, float], gpu: Gpu | None, findings: Findings) -> None:
    """Compares measured rates with those in the table, of a card that is in it."""
    expected = {}
    if gpu:
        expected = {"bf16_tflops": gpu.bf16_tflops, "tf32_tflops": gpu.tf32_tflops}
        expected["copy_gb_per_second"] = gpu.bandwidth_gb_per_second
    for name, rate in rates.items():
        if name in expected:
            findings.between(f"{name} / {expected[name]:g} of the table", rate / expected[name], *SHARE)
        findings.note(name, rate)


def run(findings: Findings, minutes: float) -> None:
    """Identifies the card and measures its rates."""
    devices = jax.local_devices()
    facts = identify(devices)
    for name, value in facts.items():
        findings.note(name, "unknown" if value is None else value)
    if facts.get("throttled"):
        findings.true(f"clocks are not held down by heat or the power supply (reasons {THROTTLED:#x} of NVML)", False)
    rates = measure_rates(devices[0])
    if len(devices) > 1 and devices[0].platform == "gpu":
        rates["all_reduce_gb_per_second"] = all_reduce_rate(devices)
    gpu = gpu_of_device(facts["device"], facts.get("pool_bytes"), load_table()) if facts["platform"] == "gpu" else None
    check_rates(rates, gpu, findings)
    findings.figures |= {"identity": facts, "rates": rates, "gpu": gpu and gpu.key}
