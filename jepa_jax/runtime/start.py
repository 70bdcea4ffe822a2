"""Starts JAX for a command: allocator, distributed processes, compile cache and mesh."""

import os
import pathlib

import jax
from jax.sharding import Mesh

from jepa_jax.config.groups import Config
from jepa_jax.runtime.allocator import prepare_allocators
from jepa_jax.runtime.compile_cache import verify_compile_cache
from jepa_jax.runtime.mesh import make_mesh
from jepa_jax.runtime.peers import check_same, connect
from jepa_jax.runtime.platforms import import_jax

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
CACHED_FROM = "jax_persistent_cache_min_compile_time_secs"


def setup(config: Config) -> Mesh:
    """Prepares the process, connects it to others where the environment asks for it, and returns the mesh."""
    import_jax()  # silences the CUDA plugin where there is no driver
    prepare_allocators(os.environ)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # so that NVML's numbers and CUDA's agree
    flags = os.environ.get("XLA_FLAGS", "")
    if config.train.deterministic and DETERMINISTIC not in flags:  # has an effect if XLA has not started yet
        os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}".strip()
    connect(os.environ)
    check_same("config", config.to_dict())
    start_compile_cache()
    return make_mesh(config.mesh.data, config.mesh.fsdp)


def start_compile_cache() -> None:
    """Keeps compiled programs between runs, small ones too; JAX_COMPILATION_CACHE_DIR names another place."""
    verify_compile_cache()
    if jax.config.values[CACHED_FROM] == 1.0:  # JAX's default; nobody has chosen another
        jax.config.update(CACHED_FROM, 0.0)  # evaluations have a dozen small programs
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    try:
        default = cache_folder() / "xla"
        default.mkdir(parents=True, exist_ok=True)
    except OSError:
        return  # a home that is read-only or missing costs a compilation, not the run
    jax.config.update("jax_compilation_cache_dir", str(default))


def cache_folder() -> pathlib.Path:
    """Returns the folder of everything that is kept between runs."""
    if named := os.environ.get("XDG_CACHE_HOME"):  # empty means unset
        return pathlib.Path(named) / "jepa_jax"
    try:
        return pathlib.Path.home() / ".cache" / "jepa_jax"
    except RuntimeError:  # no home
        return pathlib.Path(os.devnull) / "jepa_jax"  # cannot be made, as in a home that is read-only
