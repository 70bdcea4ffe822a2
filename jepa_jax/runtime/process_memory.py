"""The largest size that this process has had, since it began or since the peak was set back."""

import contextlib
import pathlib
import re
import resource
import sys

_STATUS, _CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


def peak_bytes() -> int:
    """Resident, at most: what the kernel has noted."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> bool:
    """Begins anew with what is resident now; False where the kernel does not do that.

    Freed memory that is kept (`memory.py`) is not given back for it: used again, it would look like growth.
    """
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True
