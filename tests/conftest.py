"""Sets up the tests before jax starts: eight CPU devices, a shared compile cache, this tree for every process."""

import os
import pathlib

from tests.flags import FAST_TO_COMPILE

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", FAST_TO_COMPILE]
)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".cache" / "test_xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

from jaxtyping import install_import_hook

# Shapes in signatures are checked, in all tests, while functions are traced.
CHECKED = ["jepa_jax.losses", "jepa_jax.methods", "jepa_jax.models"]
CHECKED += [f"jepa_jax.projects.wildfire.{name}" for name in ("losses", "method", "models")]
install_import_hook(CHECKED, "beartype.beartype")

from jepa_jax.runtime.allocator import keep_freed_memory  # noqa: E402
from jepa_jax.runtime.platforms import prepare_to_plan  # noqa: E402

keep_freed_memory()
prepare_to_plan()  # tests of the planner compile for GPUs in this process
