"""Settings of the memory allocators: glibc's on CPUs, JAX's pool on GPUs.

glibc returns large blocks to the system when they are freed, and XLA allocates its temporary buffers anew in every
step, so that each step pays for clearing and mapping them again (quickstart, 2 cores: 0.33 of 1.1 CPU seconds per
step). Three settings keep the blocks in the process.
"""

import ctypes
import sys
from collections.abc import Mapping

from jepa_jax.base.errors import UserError

POOL_FRACTION = 0.75  # of a GPU's memory, which JAX takes unless a variable says otherwise
POOL_VARIABLE, OLD_POOL_VARIABLE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"

# From malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_KEEP = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_ARENA_MAX: 1}
_STOCK = {_M_MMAP_MAX: 65536, _M_TRIM_THRESHOLD: 128 * 1024}  # glibc's defaults, for comparisons


def keep_freed_memory(keep: bool = True) -> bool:
    """Keeps freed memory in the process, or with `keep=False` restores the defaults. Call before JAX allocates.

    Returns:
        Whether the C library accepted the settings; False on systems without glibc, where nothing changes.
    """
    if sys.platform != "linux":
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        return all([libc.mallopt(key, value) == 1 for key, value in (_KEEP if keep else _STOCK).items()])
    except (OSError, AttributeError):
        return False


def pool_fraction(environment: Mapping[str, str]) -> float:
    """Returns the fraction of a GPU's memory that JAX takes for its pool."""
    given = [name for name in (POOL_VARIABLE, OLD_POOL_VARIABLE) if environment.get(name)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are both set, which JAX refuses; unset the second")
    for name in given:
        try:
            return float(environment[name])
        except ValueError:
            raise UserError(f"{name} = {environment[name]}: not a number; use 0 to 1, or unset it") from None
    return POOL_FRACTION


def pool_variables(fraction: float | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that make JAX take this fraction of a GPU's memory; {} for None.

    JAX refuses to start if both of its variables are set, so one that is set already is the one to set.
    """
    if fraction is None:
        return {}
    return {OLD_POOL_VARIABLE if environment.get(OLD_POOL_VARIABLE) else POOL_VARIABLE: f"{fraction:g}"}
