"""Starts JAX for a command: allocator, distributed processes, compile cache and mesh."""

import os
import pathlib
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.runtime.allocator import keep_freed_memory
from jepa_jax.runtime.mesh import make_mesh
from jepa_jax.runtime.platforms import import_jax


def setup(config: Config) -> Mesh:
    """Prepares the process, connects it to others where the environment asks for it, and returns the mesh."""
    import_jax()  # silences the CUDA plugin where there is no driver
    keep_freed_memory()
    start_distributed(os.environ)
    start_compile_cache()
    return make_mesh(config.mesh.data, config.mesh.fsdp)


def start_distributed(environment: Mapping[str, str]) -> None:
    """Starts `jax.distributed` under SLURM, or if JAX_COORDINATOR_ADDRESS, _NUM_PROCESSES and _PROCESS_ID are set."""
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        jax.distributed.initialize()
    elif "JAX_COORDINATOR_ADDRESS" in environment:
        missing = [k for k in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if k not in environment]
        if missing:
            raise UserError(f"JAX_COORDINATOR_ADDRESS is set but {' and '.join(missing)} is not; set all three")
        jax.distributed.initialize(
            environment["JAX_COORDINATOR_ADDRESS"],
            int(environment["JAX_NUM_PROCESSES"]),
            int(environment["JAX_PROCESS_ID"]),
        )


def start_compile_cache() -> None:
    """Keeps compiled programs between runs; JAX_COMPILATION_CACHE_DIR names another place."""
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    default = cache_folder() / "xla"
    try:
        default.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a read-only home costs a compilation, not the run
    jax.config.update("jax_compilation_cache_dir", str(default))


def cache_folder() -> pathlib.Path:
    """Returns the folder of everything that is kept between runs."""
    named = os.environ.get("XDG_CACHE_HOME")  # empty means unset
    return (pathlib.Path(named) if named else pathlib.Path.home() / ".cache") / "jepa_jax"
