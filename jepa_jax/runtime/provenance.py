"""Provenance of results: command, date, machine, package versions and config."""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from jepa_jax.config.schema import config_hash, differing_keys, flatten

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
SCHEMA_VERSION = 1
SAME_TO_RESUME = ("settings", "hardware", "versions")


def base_header(config: Any, config_name: str, hardware: Mapping[str, Any]) -> dict[str, Any]:
    """What a sweep and a search have in common; `config` is a ConfigDict as given."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": " ".join([pathlib.Path(sys.executable).name, *sys.argv]),
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "hardware": dict(hardware),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES},
        "config_name": config_name,
        "config_hash": config_hash(config),
        "config": json.loads(json.dumps(config.to_dict())),  # as it will be read back
    }


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What keeps two measurements from being one, by name: config keys, flags, machine and packages."""
    found = differing_keys(there["config"], here["config"])
    for part in SAME_TO_RESUME:
        before, after = flatten(there[part]), flatten(here[part])
        for key in after:
            if before.get(key) != after[key]:
                flag = f"--{key.split('.')[-1]}" if part == "settings" else key
                found.append(f"{flag}: {_as_flag(before.get(key))} -> {_as_flag(after[key])}")
    return found


def _as_flag(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def describe_hardware(gpu_index: int | None) -> dict[str, Any]:
    """Of this machine, without waking a GPU: its memory belongs to the trials."""
    import psutil

    gpu_name = gpu_memory = None
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        gpu_name, gpu_memory = first_gpu(gpu_index)
    return {
        "cpu": processor(),
        "cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu_name": gpu_name,
        "gpu_memory_bytes": gpu_memory,
    }


def unused_gpu(gpu_index: int | None = None) -> str:
    """What to tell where there is a GPU and JAX computes without it; empty where all is well. Starts JAX."""
    import jax

    name = describe_hardware(gpu_index)["gpu_name"]
    if not name or jax.default_backend() != "cpu":
        return ""
    return (
        f"there is a {name}, but JAX computes on the CPU: pip install -e '.[cuda12]' gives it what it needs, "
        "JAX_PLATFORMS=cpu says that it is meant"
    )


def first_gpu(gpu_index: int | None) -> tuple[str | None, int | None]:
    """Name and memory of the first GPU that a trial sees, as NVML tells; (None, None) without one."""
    from jepa_jax.runtime.gpus import only_gpu, visible_handles

    visible = (os.environ | only_gpu(gpu_index)).get("CUDA_VISIBLE_DEVICES")
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = visible_handles(pynvml, visible)[0]
            name = pynvml.nvmlDeviceGetName(handle)
            return name.decode() if isinstance(name, bytes) else name, pynvml.nvmlDeviceGetMemoryInfo(handle).total
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # NVML raises errors of its own; without a driver there is no GPU
        return None, None


def environment() -> dict[str, Any]:
    """Versions, devices and processor, for the report and for whoever repeats a run."""
    import jax

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
    root = pathlib.Path(__file__).resolve().parents[2]
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


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
