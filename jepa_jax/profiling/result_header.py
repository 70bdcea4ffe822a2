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

from jepa_jax.config import config_hash

SCHEMA_VERSION = 1


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
