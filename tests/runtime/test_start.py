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


@pytest.mark.parametrize("chosen", [None, "100"])
def test_programs_that_compile_at_once_are_kept_unless_the_user_says_otherwise(tmp_path, chosen):
    variable = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    own = {name: value for name, value in os.environ.items() if name not in (variable, "JAX_COMPILATION_CACHE_DIR")}
    environment = own | {"XDG_CACHE_HOME": str(tmp_path)} | ({variable: chosen} if chosen else {})
    done = subprocess.run([sys.executable, "-c", SMALL_PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["41"], done.stderr
    kept = [path.name for path in (tmp_path / "jepa_jax" / "xla").iterdir() if path.name.startswith("jit__lambda")]
    assert bool(kept) == (chosen is None)


def test_a_damaged_program_is_compiled_again_and_kept(tmp_path):
    own = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment = own | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start() -> str:
        done = subprocess.run([sys.executable, "-c", SMALL_PROGRAM], env=environment, capture_output=True, text=True)
        assert done.stdout.split() == ["41"], done.stderr
        return done.stderr

    start()
    [entry] = (tmp_path / "jepa_jax" / "xla").glob("jit__lambda*-cache")
    entry.write_bytes(entry.read_bytes()[:100])
    assert start().count("is damaged") == 1
    assert "warning" not in start() and entry.stat().st_size > 100
    assert not list(entry.parent.glob("loading-*"))
