"""GPUs that this machine does not have, as devices to compile for, and compilation for them.

XLA's CUDA compiler and NVIDIA's assembler `ptxas` come as wheels (the extra `plan`); no GPU, driver or CUDA toolkit is
needed. A topology is written "slices x hosts x GPUs per host", e.g. 1x1x8.
"""

import functools
import json
import math
import pathlib
import re
import warnings
from importlib import metadata
from typing import Any

import jax

from jepa_jax.base.errors import UserError
from jepa_jax.runtime.allocator import POOL_FRACTION
from jepa_jax.runtime.hardware import MULTIPROCESSORS, Gpu
from jepa_jax.runtime.platforms import without_driver_remarks

WHEELS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
WHEELS_13 = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")  # of an installation with jax[cuda13]
PTXAS_VERSION = "12.9.86"
# XLA recomputes values to stay within 95 % of a limit: of the allocator's pool on a real device, of this share of the
# memory on one that is not there.
ABSENT_LIMIT = 0.8
# Far more than any GPU has: told this, XLA never recomputes, which shows the need without recomputation.
UNLIMITED_BYTES = 2**42
# Without a device XLA cannot time tiles for Triton's matrix products, and those it chooses instead do not always
# compile; cuBLAS needs none. The peak of `rapid` differs by 0.4 %.
COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}
_TOPOLOGY = re.compile(r"(\d+)x(\d+)x(\d+)")


def num_devices(topology: str) -> int:
    return math.prod(_counts(topology))


def num_hosts(topology: str) -> int:
    slices, hosts, _ = _counts(topology)
    return slices * hosts


def _counts(topology: str) -> list[int]:
    match = _TOPOLOGY.fullmatch(topology)
    counts = [int(part) for part in match.groups()] if match else [0]
    if min(counts) < 1:
        raise UserError(f"--topology={topology}: write slices x hosts x GPUs per host, e.g. 1x1x8")
    return counts


def installed_wheels() -> tuple[str, ...]:
    """Returns the wheels of the compiler that belong to this installation: for CUDA 13 if it has its plugin."""
    try:
        metadata.version(WHEELS_13[0])
    except metadata.PackageNotFoundError:
        return WHEELS
    return WHEELS_13


def require_wheels() -> pathlib.Path:
    """Returns the folder of the `ptxas` wheel."""
    version = metadata.version("jax")
    install = (
        f"pip install jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12=={PTXAS_VERSION}"
    )
    wheels = installed_wheels()
    for wheel in wheels:
        try:
            found = metadata.version(wheel)
        except metadata.PackageNotFoundError:
            raise UserError(f"{wheel} is not installed: plans need it, but no GPU; {install}") from None
        if wheel.startswith("jax") and found.split(".")[:2] != version.split(".")[:2]:
            raise UserError(f"{wheel} {found} does not match jax {version}; {install}")
    place = "nvidia/cuda_nvcc" if wheels == WHEELS else "nvidia/cu13"
    return pathlib.Path(str(metadata.distribution(wheels[-1]).locate_file(place)))


@functools.cache
def absent_devices(
    gpu: Gpu, topology: str, unlimited: bool = False, memory_fraction: float = POOL_FRACTION
) -> list[Any]:
    """Returns the devices of a topology of GPUs, none of which has to exist; `unlimited` gives them endless memory.

    XLA compiles for the memory that JAX takes of the real card, which is `memory_fraction` of it.
    """
    from jax.experimental import topologies

    require_wheels()
    num_devices(topology)
    with without_driver_remarks():
        jax.devices()  # makes JAX find its plugins
        try:
            description = topologies.get_topology_desc(
                platform="cuda", topology=topology, target_config=target_config(gpu, unlimited, memory_fraction)
            )
        except RuntimeError as error:
            raise UserError(
                f"XLA's CUDA compiler did not start ({error}); without a GPU, start with JAX_PLATFORMS=cpu"
            ) from error
    return list(description.devices)


def target_config(gpu: Gpu, unlimited: bool = False, memory_fraction: float = POOL_FRACTION) -> str:
    """Returns the text of XLA's `GpuTargetConfigProto` for a GPU with such a pool, or with unlimited memory."""
    memory = UNLIMITED_BYTES if unlimited else round(gpu.memory_bytes * memory_fraction / ABSENT_LIMIT)
    major, minor = gpu.compute_capability
    shared, shared_optin, threads, units = MULTIPROCESSORS[gpu.compute_capability]
    name = json.dumps(gpu.name)
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_optin}
  threads_per_core_limit: {threads} core_count: {gpu.cores} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {round(gpu.bandwidth_gb_per_second * 1e9)} l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz} device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  name: {name} runtime_version: "12.9.0" driver_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: {name}
"""


def compile_lowered(lowered: Any, dump: pathlib.Path | None = None) -> Any:
    """Compiles what `jit(...).lower()` returned for absent devices; XLA's own notes are written to `dump`."""
    # JAX's own cache cannot read programs for absent devices and says so; ours keeps the facts.
    warnings.filterwarnings("ignore", message=".*PjRtCompiler must be constructed with a Client")
    # The assembler of the wheel, whatever toolkit this machine or CUDA_ROOT has.
    options = {**COMPILER_OPTIONS, "xla_gpu_cuda_data_dir": str(require_wheels())}
    if dump:
        options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"XLA could not compile this step for the GPU ({str(error).splitlines()[0][:200]})") from error
