"""The head of a file of results: which command, when, on which machine, with which versions, of which config."""

import datetime
import json
import os
import pathlib
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from jepa_jax.config import config_hash, differing_keys, flatten

SCHEMA_VERSION = 1
SAME_TO_RESUME = ("settings", "hardware", "versions")


def base_header(config: Any, config_name: str, hardware: Mapping[str, Any]) -> dict[str, Any]:
    """What a sweep and a search have in common; `config` is a ConfigDict as given."""
    from jepa_jax.runtime import PACKAGES

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

    from jepa_jax.profiling.peak import num_cores
    from jepa_jax.runtime import processor

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
    from jepa_jax.profiling.gpus import only_gpu, visible_handles

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
