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


LEAST_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def start(cache_home, **variables) -> str:
    """Runs a small program in a process of its own; returns what it said."""
    own = {name: text for name, text in os.environ.items() if name not in (LEAST_SECONDS, "JAX_COMPILATION_CACHE_DIR")}
    environment = own | {"XDG_CACHE_HOME": str(cache_home)} | variables
    done = subprocess.run([sys.executable, "-c", SMALL_PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["41"], done.stderr
    return done.stderr


def test_programs_that_compile_at_once_are_not_kept_if_the_user_says_so(tmp_path):
    start(tmp_path, **{LEAST_SECONDS: "100"})
    assert not list((tmp_path / "jepa_jax" / "xla").glob("jit__lambda*"))


def test_a_program_that_compiles_at_once_is_kept_and_a_damaged_one_is_compiled_again(tmp_path):
    start(tmp_path)
    [entry] = (tmp_path / "jepa_jax" / "xla").glob("jit__lambda*-cache")
    entry.write_bytes(entry.read_bytes()[:100])
    assert start(tmp_path).count("is damaged") == 1
    assert "warning" not in start(tmp_path) and entry.stat().st_size > 100
    assert not list(entry.parent.glob("loading-*"))
