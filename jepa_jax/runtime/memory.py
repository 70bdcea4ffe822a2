"""Memory of this process: what is free, its peak, and how to tell from a message that memory ran out."""

import contextlib
import pathlib
import re
import resource
import sys
from typing import Any

import psutil

from jepa_jax.base.text import gib

# What malloc, XLA, CUDA, LLVM, Python and the dynamic loader say, in lower case.
_WORDS = (
    "resource_exhausted", "out of memory", "error_out_of_memory", "status_alloc_failed", "bad_alloc", "memoryerror",
    "cannot allocate memory", "unable to allocate", "failed to allocate", "failed to map segment",
    "memory allocation",
)  # fmt: skip
# What cuDNN, cuBLAS and NCCL say when the pool has left them no memory for their handles and buffers; a broken
# installation says the same, but only at a first call, which a smaller batch would meet as well.
_LIBRARY_WORDS = (
    "dnn library initialization failed", "could not create cudnn handle",
    "failed to create cudnn handle", "cudnn_status_not_initialized", "cublas_status_not_initialized",
    "failed to create cublas handle", "cufft_alloc_failed", "unhandled cuda error", "ncclunhandledcudaerror",
    "failed to cuda calloc", "failed to cuda host alloc",
)  # fmt: skip
_THREAD_WORDS = ("resource temporarily unavailable", "can't start new thread", "pthread_create")
# XLA reports an attempt that it continues without; a kernel that needs more of a multiprocessor's shared memory than
# there is, which a smaller batch needs as well.
_HARMLESS = ("not a failure", "shared memory size limit exceeded")
_GROUP, _GROUPS = pathlib.Path("/proc/self/cgroup"), pathlib.Path("/sys/fs/cgroup")
_STATUS, _CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


def is_out_of_memory(message: str | BaseException) -> bool:
    """Returns whether an error or the text of a log says that memory ran out.

    Where the address space is limited (ulimit -v), a thread that has no room for its stack counts as well.
    """
    text = message if isinstance(message, str) else f"{type(message).__name__}: {message}"
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    wanted = _WORDS + _LIBRARY_WORDS + (_THREAD_WORDS if is_limited else ())
    lines = [line for line in text.lower().splitlines() if not any(words in line for words in _HARMLESS)]
    return any(words in line for line in lines for words in wanted)


def pool_doubt(peak_bytes: int, device: Any) -> str:
    """Returns a warning if a compiled program needs more than the pool of a device; "" on a device without one."""
    pool = (device.memory_stats() or {}).get("bytes_limit")
    if pool is None or peak_bytes <= pool:
        return ""
    return (
        f"{device.device_kind}: the step needs {gib(peak_bytes)} of the {gib(pool)} that JAX takes, and will run out "
        "of memory; jepa-jax plan --gpu=here with the same --config says what fits"
    )


def free_bytes() -> int:
    """Returns the memory that this process can still take, of the machine and of the container that it is in."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError):
        own = next((line[3:] for line in _GROUP.read_text().splitlines() if line.startswith("0::")), "/")
        place = pathlib.PurePosixPath(own.lstrip("/"))
        for part in (place, *place.parents):
            free = min(free, _free_in_group(_GROUPS / part, free))
    return free


def _free_in_group(folder: pathlib.Path, otherwise: int) -> int:
    """Returns what a control group (version 2) has left; files that the system keeps in memory give way."""
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat["inactive_file"]) + int(stat["active_file"]))
    except (OSError, ValueError, KeyError):  # not there, or "max", which is no limit
        return otherwise


def peak_bytes() -> int:
    """Returns the largest resident size of this process since it started, or since `reset_peak`."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> bool:
    """Sets the peak to the present size; returns False where the kernel does not support it.

    Freed memory that the allocator keeps (`allocator.py`) stays resident: using it again is not growth.
    """
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True
