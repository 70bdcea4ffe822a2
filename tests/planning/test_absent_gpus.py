"""Descriptions of GPUs that are not there, and the wheels that compile for them."""

import re
import sys

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.planning import absent_gpus
from jepa_jax.planning.absent_gpus import num_devices, require_wheels, target_config
from tests.planning.line_compiler import TABLE


def test_topologies_are_slices_hosts_and_gpus():
    assert num_devices("1x1x8") == 8 and num_devices("2x3x4") == 24
    for wrong in ("8", "1x8", "1x1x0", "axbxc"):
        with pytest.raises(UserError, match=f"--topology={wrong}"):
            num_devices(wrong)


def test_the_compiler_keeps_to_the_pool_that_training_will_have_unless_asked_for_the_need_without_a_limit():
    """XLA recomputes to stay within 95 % of the pool on a card, and of 80 % of the memory where there is none."""
    text = target_config(TABLE["h100"])
    assert f"device_memory_size: {round(0.9 * TABLE['h100'].memory_bytes / 0.8)}" in text and "core_count: 132" in text
    assert f"device_memory_size: {TABLE['h100'].memory_bytes}" in target_config(TABLE["h100"], memory_fraction=0.8)
    assert "device_memory_size: 4398046511104" in target_config(TABLE["h100"], unlimited=True)
    assert "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in text
    assert "ACCELERATED" not in target_config(TABLE["rtx4090"])


@pytest.mark.skipif(sys.platform != "linux", reason="the wheels of the compiler are for Linux")
def test_the_assembler_is_the_wheels_own(monkeypatch):
    monkeypatch.setenv("CUDA_ROOT", "/usr/local/cuda")
    folder = require_wheels()
    assert folder.parts[-2:] == ("nvidia", "cuda_nvcc") and (folder / "bin" / "ptxas").is_file()
    assert (folder / "nvvm").is_dir()


def test_a_missing_wheel_gives_the_line_that_installs_it(monkeypatch):
    def version(name):
        if name in ("nvidia-cuda-nvcc-cu12", "jax-cuda13-plugin"):
            raise absent_gpus.metadata.PackageNotFoundError(name)
        return "0.10.2"

    monkeypatch.setattr(absent_gpus.metadata, "version", version)
    line = "pip install jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12==12.9.86"
    with pytest.raises(UserError, match=re.escape(line)):
        require_wheels()


def test_an_installation_for_cuda_13_uses_its_own_wheels(monkeypatch):
    monkeypatch.setattr(absent_gpus.metadata, "version", lambda name: "0.10.2")
    assert absent_gpus.installed_wheels() == absent_gpus.WHEELS_13
