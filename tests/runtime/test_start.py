"""Where things are kept between runs."""

import pathlib

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
