"""Settings of the memory allocators: glibc's on CPUs, JAX's pool on GPUs.

glibc returns large blocks to the system when they are freed, and XLA allocates its temporary buffers anew in every
step, so that each step pays for clearing and mapping them again (quickstart, 2 cores: 0.33 of 1.1 CPU seconds per
step). Three settings keep the blocks in the process. What compilation leaves free between used blocks is set aside.
"""

import ctypes
import mmap
import sys
from collections.abc import Mapping, MutableMapping

from jepa_jax.base.errors import UserError
from jepa_jax.base.machine import has_nvidia_driver

POOL_FRACTION = 0.9  # of a GPU's memory; the rest is for CUDA's context, its libraries and NCCL (JAX's own: 0.75)
POOL_VARIABLE, OLD_POOL_VARIABLE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"

# From malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
# Trimming is off at -1 alone: the largest number that mallopt takes is 2 GiB, and steps free more than that.
_KEEP = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_ARENA_MAX: 1}
_STOCK = {_M_MMAP_MAX: 65536, _M_TRIM_THRESHOLD: 128 * 1024}  # glibc's defaults, for comparisons

MANY_GAPS = 5_000  # a step that comes from the cache leaves about 1,000 gaps, compilation of one 45,000
_SMALLEST_GAP = 2**10  # bytes; malloc finds smaller ones without a search
_LARGE_GAP, _LARGEST_GAP = 2**20, 2**26  # bytes; large ones are few, and steps use them
_FINER = 1.2  # ratio of the sizes that are asked for one after the other


class MallocAccount(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def malloc_account() -> MallocAccount | None:
    """Returns what malloc has handed out; None unless the C library is glibc 2.33 or newer."""
    libc = _libc()
    if libc is None or not hasattr(libc, "mallinfo2"):
        return None
    libc.mallinfo2.restype = MallocAccount
    return libc.mallinfo2()


def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL("libc.so.6")
    except OSError:
        return None


def prepare_allocators(environment: MutableMapping[str, str]) -> None:
    """Sets both allocators up before JAX starts; a fraction of the GPU that a variable names already stays.

    Where steps run on a GPU, malloc stays as it is: one arena would make the threads wait that XLA compiles on.
    """
    if not has_nvidia_driver() or environment.get("JAX_PLATFORMS") == "cpu":
        keep_freed_memory()
    environment.update(pool_variables(pool_fraction(environment), environment))


def keep_freed_memory(keep: bool = True) -> bool:
    """Keeps freed memory in the process, or restores the defaults, before JAX starts; returns False without glibc."""
    libc = _libc()
    if libc is None or not hasattr(libc, "mallopt"):
        return False
    return all([libc.mallopt(key, value) == 1 for key, value in (_KEEP if keep else _STOCK).items()])


def return_freed_memory() -> None:
    """Returns to the system what is free now, once: after a large array that no step will need again."""
    libc = _libc()
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def set_gaps_aside() -> int:
    """Allocates free memory between used blocks, never frees it, and returns its pages to the system.

    Compilation leaves tens of thousands of gaps. Threads that run a step allocate thousands of times, and malloc would
    search the gaps each time, one thread after the other (`ijepa_cifar10`: a third of the step).
    """
    libc, account = _libc(), malloc_account()
    if libc is None or account is None or account.ordblks < MANY_GAPS:
        return 0
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    gaps = account.fordblks - account.keepcost  # bytes
    end_of_gaps = libc.sbrk(0) - account.keepcost  # then comes one free block, from which the heap grows
    size, taken, aside, large = _LARGEST_GAP, 0, 0, []
    while size >= _SMALLEST_GAP and taken < gaps:
        block = libc.malloc(size)
        if block is None or block >= end_of_gaps:  # no gap of this size is left
            libc.free(block)
            size = int(size / _FINER)
            continue
        taken += size
        if size >= _LARGE_GAP:
            large.append(block)
            continue
        aside += size
        first_page = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        if (whole_pages := (block + size - first_page) // mmap.PAGESIZE) > 0:
            libc.madvise(first_page, whole_pages * mmap.PAGESIZE, mmap.MADV_DONTNEED)
    for block in large:
        libc.free(block)
    return aside


def pool_fraction(environment: Mapping[str, str]) -> float:
    """Returns the fraction of a GPU's memory that JAX takes for its pool in runs that are started here."""
    name = OLD_POOL_VARIABLE if environment.get(OLD_POOL_VARIABLE) else POOL_VARIABLE
    try:
        return float(environment.get(name) or POOL_FRACTION)
    except ValueError:
        raise UserError(f"{name} = {environment[name]}: not a number; use 0 to 1, or unset it") from None


def pool_variables(fraction: float | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that make JAX take this fraction of a GPU's memory; {} for None.

    JAX refuses to start if both of its variables are set, so one that is set already is the one to set.
    """
    if fraction is None:
        return {}
    return {OLD_POOL_VARIABLE if environment.get(OLD_POOL_VARIABLE) else POOL_VARIABLE: f"{fraction:g}"}
