"""A quiet start on machines without a GPU, and the compiler for GPUs when a plan asks for it."""

import os
import types

import pytest

from jepa_jax.runtime import platforms


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(platforms, "DRIVER_FILES", ())


def test_without_a_driver_the_plugin_is_left_out(no_driver):
    modules: dict = {}
    platforms.leave_out_absent_gpus({}, modules)
    assert modules[platforms.CUDA_PLUGIN].initialize() is None
    assert modules[platforms.CUDA_LIBRARIES] is None


def test_who_sets_the_platform_or_has_a_driver_keeps_it(no_driver, monkeypatch, tmp_path):
    modules: dict = {}
    platforms.leave_out_absent_gpus({"JAX_PLATFORMS": "cuda"}, modules)
    monkeypatch.setattr(platforms, "DRIVER_FILES", (str(tmp_path),))
    platforms.leave_out_absent_gpus({}, modules)
    assert modules == {}


def test_a_plan_takes_the_compiler_back_but_wakes_no_gpu(no_driver):
    modules: dict = {}
    environment: dict = {}
    platforms.leave_out_absent_gpus(environment, modules)
    platforms.prepare_to_plan(environment, modules)
    assert modules == {} and environment == {"JAX_PLATFORMS": "cpu"}
    loaded = types.ModuleType("loaded")
    loaded.__file__ = "somewhere"
    modules[platforms.CUDA_PLUGIN] = loaded
    platforms.prepare_to_plan(environment, modules)
    assert modules == {platforms.CUDA_PLUGIN: loaded}


def test_remarks_about_the_driver_are_held_back_and_nothing_else(capfd):
    with platforms.without_driver_remarks():
        os.write(2, b"I0000 cudart_stub.cc:31] Could not find cuda drivers\nE0000 something is really wrong\n")
    assert capfd.readouterr().err == "E0000 something is really wrong\n"
