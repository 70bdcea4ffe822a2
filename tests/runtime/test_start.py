"""Where things are kept between runs."""

import os
import pathlib
import subprocess
import sys

import pytest

from jepa_jax.runtime.start import cache_folder


@pytest.mark.parametrize("value", [None, ""])
def test_an_empty_cache_home_counts_as_unset(monkeypatch, value):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_folder() == pathlib.Path("/home/somebody/.cache/jepa_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == pathlib.Path("/cache/jepa_jax")


SMALL_PROGRAM = """
import jax
from jepa_jax.runtime.start import start_compile_cache

start_compile_cache()
print(int(jax.jit(lambda x: x * 2 + 1)(20)))
"""


def test_programs_that_compile_at_once_are_kept_too(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", SMALL_PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["41"], done.stderr
    assert any(path.name.startswith("jit__lambda") for path in (tmp_path / "jepa_jax" / "xla").iterdir())
