"""Training's use of plans: a warning before a step that will not fit, ways out when memory ran out."""

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


def check(config):
    """Returns what `check_memory` wrote."""
    text = io.StringIO()
    memory_check.check_memory(config, FakeProgram(), CIFAR, Console(text))
    return text.getvalue()


def explain(config):
    return memory_check.explain_out_of_memory(config, FakeProgram(), CIFAR, Console(io.StringIO()))


def test_training_warns_of_a_step_that_will_not_fit():
    assert check(load_config("rapid")) == ""
    text = check(config_with(8192))
    assert "warning" in text and "will run out of memory" in text and "--gpu=rtx4090" in text


def test_without_a_gpu_or_switched_off_nothing_is_planned(monkeypatch):
    assert check(config_with(8192, **{"profile.plan": False})) == ""
    monkeypatch.setattr(memory_check, "present_gpu", lambda: None)
    assert check(config_with(8192)) == ""
    assert "smaller batch" in explain(config_with(8192))


@pytest.mark.parametrize("error", [UserError("no wheels"), KeyError("fusion.7")])
@pytest.mark.parametrize("broken", ["StepCompiler", "present_gpu"])
def test_a_plan_that_cannot_be_made_stops_nothing(monkeypatch, error, broken):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(memory_check, broken, fail)
    text = check(config_with(8192))
    assert "warning" not in text and str(error) in text and "config.profile.plan=False" in text
    message = explain(config_with(8192))
    assert "config.data.batch_size = 8192" in message and "smaller batch" in message


def test_out_of_memory_ends_with_ways_out():
    message = explain(config_with(8192))
    assert "config.data.batch_size = 8192" in message and "--config.train.remat=full" in message
    assert "see one part at a time" in message  # what accumulation changes


def test_memory_that_should_be_enough_is_looked_for_elsewhere(monkeypatch):
    message = explain(config_with(512))
    assert "nvidia-smi" in message and "MEM_FRACTION" not in message  # 75 % of the memory is enough
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.05")
    message = explain(config_with(512))
    assert "JAX takes 5 % of the memory" in message and "MEM_FRACTION=0." in message
