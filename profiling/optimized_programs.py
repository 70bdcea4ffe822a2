"""Programs for absent GPUs as XLA optimizes, schedules and places them in memory, without the code of their kernels.

XLA and the assembler need three quarters of the time for that code, which changes no figure that plans are made of.
"""

import os
import pathlib
import signal
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jepa_jax.compiled.hlo import CompiledProgram

POLL_SECONDS = 0.1


def compile_apart(lower: Callable[[], Any], folder: pathlib.Path, *, whole: bool = False) -> str:
    """Compiles what `lower` returns in a process of its own, which leaves XLA's notes in a folder.

    Unless `whole`, the process is ended when XLA begins to make the code of kernels. This process must not have started
    JAX, whose threads the other would lack.

    Returns:
      An error; "" if there is none.
    """
    failure = folder / "error"
    if (child := os.fork()) == 0:
        try:
            from jepa_jax.planning.absent_gpus import compile_lowered

            compile_lowered(lower(), folder)
        except BaseException as error:  # whatever it is: other programs count too
            failure.write_text(f"{type(error).__name__}: {str(error)[:300]}")
            traceback.print_exc()
        os._exit(0)
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(POLL_SECONDS)
        if not whole and next(folder.glob("*.ll"), None):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return ""
    return failure.read_text() if failure.exists() else ""


def optimized_text(folder: pathlib.Path) -> str:
    """Returns the text of the program whose notes are in a folder."""
    paths = folder.glob("*after_optimizations.txt")
    return max(paths, key=lambda path: path.stat().st_size).read_text()  # of several modules, the step is the largest


def read_notes(folder: pathlib.Path) -> "tuple[CompiledProgram, int]":
    """Returns the program whose notes are in a folder, and its peak in bytes: up to 1.4 % above XLA's own figure."""
    from jepa_jax.compiled.buffers import read_peak
    from jepa_jax.compiled.hlo import parse_hlo

    return (program := parse_hlo(optimized_text(folder))), read_peak(folder, program, {}).bytes
