"""A quiet start on machines without a GPU, with and without the compiler for GPUs."""

import logging
import os
import pathlib
import subprocess
import sys

import pytest

from jepa_jax.base.machine import has_nvidia_driver
from jepa_jax.runtime import platforms

no_driver = pytest.mark.skipif(has_nvidia_driver(), reason="JAX starts the GPU")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new process in which nothing is set that conftest.py sets for JAX."""
    variables = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("JAX_")}
    root = pathlib.Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=variables, capture_output=True, text=True, timeout=1200
    )


def test_importing_the_package_changes_nothing():
    code = """
import os, sys
variables, modules = dict(os.environ), set(sys.modules)
import jepa_jax
assert dict(os.environ) == variables
assert not [name for name in set(sys.modules) - modules if name.startswith("jax")]
"""
    ended = run_python(code)
    assert ended.returncode == 0, ended.stderr


@no_driver
@pytest.mark.parametrize(
    "code",
    [
        "platforms.import_jax(); import jax; print(jax.devices())",
        "platforms.prepare_to_plan(); import jax\nwith platforms.without_driver_remarks(): print(jax.devices())",
    ],
)
def test_without_a_driver_jax_starts_on_the_cpu_and_says_nothing(code):
    ended = run_python(f"from jepa_jax.runtime import platforms; {code}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[CpuDevice(id=0)]\n", "")


def test_only_the_failing_plugin_is_kept_out_of_the_log():
    def record(message: str) -> logging.LogRecord:
        return logging.LogRecord("jax", logging.ERROR, "", 0, message, (), None)

    failed = "Jax plugin configuration error: Exception when calling jax_plugins.xla_cuda12.initialize()"
    assert not platforms._is_worth_logging(record(failed))
    assert platforms._is_worth_logging(record(failed.replace("xla_cuda12", "other")))


def test_remarks_about_the_driver_are_held_back_and_nothing_else(capfd):
    with platforms.without_driver_remarks():
        os.write(2, b"I0000 cudart_stub.cc:31] Could not find cuda drivers\nE0000 something is really wrong\n")
    assert capfd.readouterr().err == "E0000 something is really wrong\n"
