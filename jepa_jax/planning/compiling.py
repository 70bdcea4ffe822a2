"""Compiles lowered programs for GPUs that are not there."""

import contextlib
import pathlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from jepa_jax.base.errors import UserError
from jepa_jax.planning.absent_gpus import require_wheels

# Without a device XLA cannot time tiles for Triton's matrix products, and those it chooses instead do not always
# compile; cuBLAS needs none. The peak of `rapid` differs by 0.4 %.
COMPILER_OPTIONS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False}


def compile_lowered(lowered: Any, dump: pathlib.Path | None = None) -> Any:
    """Compiles what `jit(...).lower()` returned for absent devices; XLA's own notes are written to `dump`."""
    # JAX's own cache cannot read programs for absent devices and says so; ours keeps the facts.
    warnings.filterwarnings("ignore", message=".*PjRtCompiler must be constructed with a Client")
    # The assembler of the wheel, whatever toolkit this machine or CUDA_ROOT has.
    options = {**COMPILER_OPTIONS, "xla_gpu_cuda_data_dir": str(require_wheels())}
    if dump:
        options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"XLA could not compile this step for the GPU ({str(error).splitlines()[0][:200]})") from error


@contextlib.contextmanager
def dump_folder() -> Iterator[pathlib.Path]:
    """Yields a folder for XLA's notes, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="jepa_jax_plan_") as folder:
        yield pathlib.Path(folder)
