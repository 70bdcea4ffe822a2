"""Sets up the tests before jax starts: eight CPU devices, a shared compile cache, this tree for every process."""

import gc
import multiprocessing
import os
import pathlib

import hypothesis
import pytest

from tests.flags import FAST_TO_COMPILE

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads of scikit-learn that wait leave the cores to others
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", FAST_TO_COMPILE]
)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".cache" / "test_xla"))
# What compiles in less is compiled again: storing it would cost a first run more than it saves later ones.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

from jaxtyping import install_import_hook

# Shapes in signatures are checked, in all tests, while functions are traced.
CHECKED = ["jepa_jax.losses", "jepa_jax.methods", "jepa_jax.models"]
CHECKED += [f"jepa_jax.projects.wildfire.{name}" for name in ("losses", "method", "models")]
install_import_hook(CHECKED, "beartype.beartype")

from jepa_jax.runtime.allocator import keep_freed_memory  # noqa: E402
from jepa_jax.runtime.platforms import prepare_to_plan  # noqa: E402

# The same examples in each run, on any machine, however slowly they are made.
slow_to_make = hypothesis.HealthCheck.too_slow
hypothesis.settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=[slow_to_make]
)
hypothesis.settings.load_profile("repeatable")

keep_freed_memory()
prepare_to_plan()  # tests of the planner compile for GPUs in this process

gc.collect()
gc.freeze()  # what is imported stays; collections need not visit it again and again
gc.set_threshold(100_000, 50, 100)  # tracing makes many objects that live as long as their program

# Folders with the longest tests; with `--no-loadscope-reorder` no process is left with one of them at the end.
FIRST = "training program projects methods planning models evals data test_package.py runtime".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: index for index, name in enumerate(FIRST)}
    root = pathlib.Path(__file__).parent
    items.sort(key=lambda item: rank.get(item.path.relative_to(root).parts[0], len(rank)))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, dict]:
    """Folder and summary of a finished run of the tiny config, for tests that copy it or compare with it."""
    from tests.runs import WHOLE, run

    workdir = tmp_path_factory.mktemp("tiny") / "run"
    return workdir, run(workdir, **WHOLE)


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets data workers fork from a process that has imported what each would import itself for seconds."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["jepa_jax.data.workers", "jepa_jax.data.batches"])
    contexts = {"spawn": forking}
    make = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind=None: contexts.get(kind) or make(kind))
    monkeypatch.setattr("jepa_jax.data.workers.KILL_SECONDS", 600.0)
