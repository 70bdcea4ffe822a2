"""Which accelerators JAX looks for when it starts, and what it says about those that are not there.

The compiler for GPUs (extra `plan`) registers itself with JAX. On a machine without a driver it would announce that at
every start, with a traceback; these functions keep a start quiet. They do not import jax.
"""

import contextlib
import os
import pathlib
import re
import sys
import tempfile
import types
from collections.abc import Iterator, MutableMapping
from typing import Any

DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one: Windows' Linux
CUDA_PLUGIN = "jax_plugins.xla_cuda12"  # what JAX starts
CUDA_LIBRARIES = "jax_cuda12_plugin"  # what it loads for that, already when it is imported
_REMARK = re.compile(r"cudart_stub\.cc|before absl::InitializeLog")


def has_nvidia_driver() -> bool:
    return any(pathlib.Path(path).exists() for path in DRIVER_FILES)


def leave_out_absent_gpus(
    environment: MutableMapping[str, str] = os.environ, modules: MutableMapping[str, Any] = sys.modules
) -> None:
    """Before jax is imported: without a driver, JAX does not load its CUDA plugin, unless JAX_PLATFORMS asks for it."""
    if "cuda" in environment.get("JAX_PLATFORMS", "") or has_nvidia_driver() or CUDA_PLUGIN in modules:
        return
    stand_in = types.ModuleType(CUDA_PLUGIN)
    stand_in.initialize = lambda: None  # type: ignore[attr-defined]
    modules[CUDA_PLUGIN] = stand_in
    modules[CUDA_LIBRARIES] = None  # importing it fails, as if it were not installed


def prepare_to_plan(
    environment: MutableMapping[str, str] = os.environ, modules: MutableMapping[str, Any] = sys.modules
) -> None:
    """Before jax is imported: the CUDA compiler is loaded after all, but no GPU is woken."""
    environment["JAX_PLATFORMS"] = "cpu"
    if isinstance(modules.get(CUDA_PLUGIN), types.ModuleType) and not hasattr(modules[CUDA_PLUGIN], "__file__"):
        del modules[CUDA_PLUGIN]
    if modules.get(CUDA_LIBRARIES, ...) is None:
        del modules[CUDA_LIBRARIES]


@contextlib.contextmanager
def without_driver_remarks() -> Iterator[None]:
    """Holds back what the CUDA plugin's libraries print about a missing driver; anything else still comes through."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held, _standard_error_to(held.fileno()):
        try:
            yield
        finally:
            held.seek(0)
            lines = held.read().decode(errors="replace").splitlines(keepends=True)
    sys.stderr.write("".join(line for line in lines if not _REMARK.search(line)))


@contextlib.contextmanager
def _standard_error_to(descriptor: int) -> Iterator[None]:
    """The process's standard error itself, since C++ libraries do not know of `sys.stderr`."""
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
