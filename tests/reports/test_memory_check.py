"""Training's use of plans: ways out when memory ran out."""

import io

import pytest

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.program.config import load_config
from jepa_jax.reports import memory_check
from tests.planning.line_compiler import CIFAR, TABLE, LineCompiler


class Mesh:
    size = 1


class FakeProgram:
    mesh = Mesh()


@pytest.fixture(autouse=True)
def rtx4090(monkeypatch):
    monkeypatch.setattr(memory_check, "StepCompiler", lambda data, folder, on_compile: LineCompiler(data=data))
    monkeypatch.setattr(memory_check, "present_gpu", lambda: TABLE["rtx4090"])


def config_with(batch_size, **changes):
    return load_config("rapid", {"data.batch_size": batch_size, **changes})


def explain(config):
    return memory_check.explain_out_of_memory(config, FakeProgram(), CIFAR, Console(io.StringIO()))


def test_without_a_gpu_the_advice_is_general(monkeypatch):
    monkeypatch.setattr(memory_check, "present_gpu", lambda: None)
    assert "smaller batch" in explain(config_with(8192))


@pytest.mark.parametrize("error", [UserError("no wheels"), KeyError("fusion.7")])
@pytest.mark.parametrize("broken", ["StepCompiler", "present_gpu"])
def test_a_plan_that_cannot_be_made_leaves_general_advice(monkeypatch, error, broken):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(memory_check, broken, fail)
    message = explain(config_with(8192))
    assert "config.data.batch_size = 8192" in message and "smaller batch" in message


def test_out_of_memory_ends_with_ways_out():
    message = explain(config_with(8192))
    assert "config.data.batch_size = 8192" in message and "--config.train.remat=full" in message
    assert "the loss of all of it" in message  # what accumulation changes


def test_memory_that_should_be_enough_is_looked_for_elsewhere(monkeypatch):
    assert "nvidia-smi" in explain(config_with(512))
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.05")
    message = explain(config_with(512))
    assert "that JAX takes of a NVIDIA GeForce RTX 4090, 5 % (XLA_CLIENT_MEM_FRACTION)" in message
