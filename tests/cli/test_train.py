"""`jepa-jax train --gpu=N`: the only GPU that JAX sees."""

import os

import pytest

from jepa_jax.base import machine
from jepa_jax.base.companions import PLACE_VARIABLES
from jepa_jax.base.errors import UserError
from jepa_jax.cli.main import find_command, main
from jepa_jax.cli.train import use_gpu


@pytest.mark.parametrize("name", ["train", "lr-search", "tradeoff"])
def test_commands_that_train_take_a_gpu(name):
    needed = {"train": ["--workdir=W"], "lr-search": ["--lrs=1", "--output_dir=D"], "tradeoff": ["--output_dir=D"]}
    assert find_command(name).parse(["--config=quickstart", *needed[name], "--gpu", "1"]).gpu == 1


def test_only_the_chosen_gpu_is_visible(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "DRIVER_FILES", (str(tmp_path),))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-abc,GPU-def")
    use_gpu(None)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-abc,GPU-def"
    with pytest.raises(UserError, match="--gpu = 2: CUDA_VISIBLE_DEVICES = GPU-abc,GPU-def leaves 2 GPUs"):
        use_gpu(2)
    use_gpu(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-def"
    monkeypatch.setenv(PLACE_VARIABLES[0], "localhost:1")
    with pytest.raises(UserError, match="leave it out"):
        use_gpu(0)


@pytest.mark.parametrize(
    "value, message",
    [
        ("x", "--gpu=x"),
        ("-1", "--gpu=-1: -1 is not a non-negative integer"),
        ("0", "--gpu=0: this machine has no NVIDIA driver"),
    ],
)
def test_a_gpu_that_cannot_be_is_refused(value, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine, "DRIVER_FILES", ())
    assert main(["train", "--config=quickstart", f"--workdir={tmp_path}/run", f"--gpu={value}"]) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []
