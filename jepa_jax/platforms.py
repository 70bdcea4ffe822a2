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
from collections.abc import Iterator, MutableMapping
from typing import Any

DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one: Windows' Linux
CUDA_PLUGIN = "jax_plugins.xla_cuda12"
_REMARK = re.compile(r"cudart_stub\.cc|before absl::InitializeLog")


def has_nvidia_driver() -> bool:
    return any(pathlib.Path(path).exists() for path in DRIVER_FILES)


def leave_out_absent_gpus(
    environment: MutableMapping[str, str] = os.environ, modules: MutableMapping[str, Any] = sys.modules
) -> None:
    """Before jax is imported: without a driver, JAX does not load its CUDA plugin; JAX_PLATFORMS has the last word."""
    if "JAX_PLATFORMS" in environment or has_nvidia_driver():
        return
    modules.setdefault(CUDA_PLUGIN, None)  # importing it fails, which JAX notes at a level that is not shown


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
