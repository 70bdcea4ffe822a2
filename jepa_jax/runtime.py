"""Before the first array: processes, compile cache, mesh; and what machine this is."""

import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jepa_jax.errors import UserError
from jepa_jax.memory import keep_freed_memory

BATCH_AXES = ("data", "fsdp")  # every device holds a part of the batch
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def setup(config: Any) -> Mesh:
    """Starts `jax.distributed` where the environment asks for it, the compile cache and the mesh of group `mesh`."""
    keep_freed_memory()
    start_distributed(os.environ)
    start_compile_cache()
    return make_mesh(config.mesh.data, config.mesh.fsdp)


def start_distributed(environment: Any) -> None:
    """Several processes: under SLURM, or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set."""
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        jax.distributed.initialize()
    elif "JAX_COORDINATOR_ADDRESS" in environment:
        missing = [k for k in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if k not in environment]
        if missing:
            raise UserError(f"JAX_COORDINATOR_ADDRESS is set but {' and '.join(missing)} is not; set all three")
        jax.distributed.initialize(
            environment["JAX_COORDINATOR_ADDRESS"],
            int(environment["JAX_NUM_PROCESSES"]),
            int(environment["JAX_PROCESS_ID"]),
        )


def start_compile_cache() -> None:
    """Keeps compiled programs between runs; JAX_COMPILATION_CACHE_DIR names another place."""
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    default = cache_folder() / "xla"
    try:
        default.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home costs a compilation, not the run
    jax.config.update("jax_compilation_cache_dir", str(default))


def cache_folder() -> pathlib.Path:
    """Where things are kept between runs."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "jepa_jax"


def make_mesh(data: int, fsdp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Axes `data` and `fsdp`; data = -1 takes every device that fsdp leaves.

    Args:
        devices: those of another machine, to compile for it; by default the ones that are here.
    """
    devices = jax.devices() if devices is None else devices
    if data == -1:
        if len(devices) % fsdp:
            raise UserError(f"config.mesh.fsdp = {fsdp}: does not divide the {len(devices)} devices; use a divisor")
        data = len(devices) // fsdp
    if data * fsdp > len(devices):
        raise UserError(
            f"config.mesh = {data} x {fsdp} (data x fsdp): there are {len(devices)} devices; use mesh.data = -1"
        )
    return Mesh(np.array(devices[: data * fsdp]).reshape(data, fsdp), BATCH_AXES, axis_types=(AxisType.Auto,) * 2)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The batch axis split over all devices."""
    return NamedSharding(mesh, P(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def whole_array(array: Any) -> np.ndarray:
    """The array on this host, also when other processes hold parts of it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def check_batch(config: Any, mesh: Mesh) -> None:
    """Every device must get the same number of images in each part of a batch."""
    part = config.data.batch_size // config.train.accum_steps
    if part % mesh.size:
        raise UserError(
            f"config.data.batch_size = {config.data.batch_size} in {config.train.accum_steps} accumulation steps: "
            f"{part} images a part do not divide over {mesh.size} devices; "
            f"use a multiple of {mesh.size * config.train.accum_steps}, or set config.mesh.data"
        )
    if config.eval.batch_size % mesh.size:
        raise UserError(
            f"config.eval.batch_size = {config.eval.batch_size}: not divisible by {mesh.size} devices; use a multiple"
        )


def environment() -> dict[str, Any]:
    """Versions, devices and processor, for the report and for whoever repeats a run."""
    device = jax.devices()[0]
    return {
        "command": " ".join([pathlib.Path(sys.executable).name, *sys.argv]),
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
        "platform": jax.default_backend(),
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "processes": jax.process_count(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _git_commit() -> str | None:
    root = pathlib.Path(__file__).resolve().parents[1]
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None  # an installed package, or no git


def processor() -> str:
    """What the processor calls itself."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
