"""Provenance of results: the command, the machine, the versions of packages, and the config."""

import datetime
import functools
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

from jepa_jax.base.classes import references
from jepa_jax.base.processes import num_cores
from jepa_jax.config.groups import Config
from jepa_jax.config.schema import config_hash, differing_keys, flatten
from jepa_jax.runtime.gpus import NO_CARD, first_gpu

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
SCHEMA_VERSION = 1
SAME_TO_RESUME = ("settings", "hardware", "versions")
PACKAGE = pathlib.Path(__file__).resolve().parents[1]
NO_EFFECT = ("cli", "exports", "experiments", "planning", "reports")  # folders that do not decide what a run computes


def command() -> str:
    return " ".join([pathlib.Path(sys.executable).name, *sys.argv])


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide about results."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


def code_version(config: Config) -> dict[str, str]:
    """Returns what the bits of a run depend on besides config and data: versions of packages, and digests of sources.

    Sources are those of this package that take part in training, and the modules of the classes and functions of the
    user's own that the config names; those must have been imported.
    """
    modules = {name.partition(":")[0] for name in references(flatten(config).values())}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(modules)}
    own = {name: _digest([pathlib.Path(file)]) for name, file in files.items() if file}
    return {**_package_versions(), **own}


@functools.cache
def _package_versions() -> dict[str, str]:
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name not in NO_EFFECT]
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return {"jepa_jax": _digest(sources)} | {name: metadata.version(name) for name in PACKAGES}


def _digest(files: Iterable[pathlib.Path]) -> str:
    """Returns twelve digits of a digest of the content of files."""
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()[:12]


def processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Returns what is needed to repeat a run: command, commit, versions, devices and machine. Starts JAX."""
    import jax

    return {
        "command": command(),
        "git_commit": git_commit(),
        **versions(),
        "platform": jax.default_backend(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "processor": processor(),
        "cores": num_cores(),
        "system": platform.platform(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def git_commit() -> str | None:
    root = pathlib.Path(__file__).resolve().parents[2]
    try:
        arguments = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None  # an installed package, or no git


def describe_hardware(gpu_index: int | None) -> dict[str, Any]:
    """Returns processor, memory and first GPU of this machine, without starting JAX: trials need the GPU's memory."""
    import psutil

    card = NO_CARD if os.environ.get("JAX_PLATFORMS") == "cpu" else first_gpu(gpu_index)
    return {
        "cpu": processor(),
        "cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu_name": card.name,
        "gpu_memory_bytes": card.memory_bytes,
    }


def unused_gpu(gpu_index: int | None = None) -> str:
    """Returns a warning if there is a GPU that JAX does not use, otherwise an empty string. Starts JAX."""
    import jax

    name = describe_hardware(gpu_index)["gpu_name"]
    if not name or jax.default_backend() != "cpu":
        return ""
    return (
        f"there is a {name}, but JAX computes on the CPU: pip install -e '.[cuda12]' makes it usable, "
        "JAX_PLATFORMS=cpu silences this warning"
    )


def base_header(config: Config | None, config_name: str, hardware: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the header of a file of measurements: what was measured, where and with what; None: without a config."""
    values = config.to_dict() if config else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command(),
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "hardware": dict(hardware),
        "versions": versions(),
        "config_name": config_name,
        "config_hash": config_hash(config or {}),
        "config": json.loads(json.dumps(values)),  # as it will be read back
    }


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Returns what differs between two headers and keeps their measurements from being mixed, one line each."""
    found = differing_keys(there["config"], here["config"])
    for part in SAME_TO_RESUME:
        before, after = flatten(there[part]), flatten(here[part])
        for key in after:
            if before.get(key) != after[key]:
                flag = f"--{key.split('.')[-1]}" if part == "settings" else key
                values = [one if isinstance(one, tuple | list) else [one] for one in (before.get(key), after[key])]
                found.append(f"{flag}: {' -> '.join(','.join(map(str, one)) for one in values)}")
    return found
