"""A quiet start of JAX on machines without an NVIDIA driver, with or without its compiler for GPUs.

The extra `plan` installs XLA's CUDA compiler as a plugin of JAX. Without a driver, the plugin's libraries print remarks
to standard error when jax is imported, and JAX logs a traceback when it starts and leaves the plugin out.
"""

import contextlib
import logging
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

from jepa_jax.base.machine import has_nvidia_driver

PLAN_WHEELS = pathlib.Path(sys.prefix, "plan")  # where `make` installs that compiler: jax alone does not find it there
_REMARK = re.compile(r"cudart_stub\.cc|before absl::InitializeLog")
_JAX_LOGGER = "jax._src.xla_bridge"
_PLUGIN_FAILED = re.compile(r"jax_plugins\.xla_cuda1[23]\.initialize\(\)")


def import_jax() -> None:
    """Imports jax; without a driver, neither the import nor the start of JAX reports the CUDA plugin it leaves out."""
    if has_nvidia_driver():
        return
    logging.getLogger(_JAX_LOGGER).addFilter(_is_worth_logging)
    if "jax" not in sys.modules:
        with without_driver_remarks():
            import jax  # noqa: F401


def _is_worth_logging(record: logging.LogRecord) -> bool:
    return not _PLUGIN_FAILED.search(record.getMessage())


def prepare_to_plan() -> None:
    """Imports jax so that it computes on the CPU, with the CUDA compiler registered. Call before JAX starts."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if PLAN_WHEELS.is_dir() and str(PLAN_WHEELS) not in sys.path:
        sys.path.append(str(PLAN_WHEELS))
    import_jax()
    import jax

    jax.config.update("jax_platforms", "cpu")  # the variable is not read again if jax was imported before


@contextlib.contextmanager
def without_driver_remarks() -> Iterator[None]:
    """Drops what the CUDA plugin's libraries print about a missing driver; everything else is printed afterwards."""
    sys.stderr.flush()
    standard_error = os.dup(2)  # of the process itself: C++ libraries do not use `sys.stderr`
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
            held.seek(0)
            lines = held.read().decode(errors="replace").splitlines(keepends=True)
            sys.stderr.write("".join(line for line in lines if not _REMARK.search(line)))
