"""Training's use of plans: a warning before a step that will not fit, ways out when memory ran out."""

import io

import pytest

from configs import rapid
from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.planning import memory_check
from tests.planning.test_planner import TABLE, LineCompiler


class Mesh:
    size = 1


class FakeProgram:
    mesh = Mesh()


@pytest.fixture
def planned_training(monkeypatch):
    monkeypatch.setattr(memory_check, "StepCompiler", lambda data, folder, on_compile: LineCompiler(data=data))
    return {"num_train": 50_000, "num_classes": 10, "gpu": TABLE["rtx4090"]}


def test_training_warns_of_a_step_that_will_not_fit(planned_training):
    config, text = rapid.get_config(), io.StringIO()
    assert not memory_check.warn_if_too_large(config, FakeProgram(), Console(text), **planned_training)
    config.data.batch_size = 8192
    assert memory_check.warn_if_too_large(config, FakeProgram(), Console(text), **planned_training)
    assert "will run out of memory" in text.getvalue() and "--gpu=rtx4090" in text.getvalue()


def test_training_without_a_gpu_says_nothing(planned_training):
    config, text = rapid.get_config(), io.StringIO()
    assert not memory_check.warn_if_too_large(config, FakeProgram(), Console(text), **{**planned_training, "gpu": None})

    assert text.getvalue() == ""


@pytest.mark.parametrize("error", [UserError("no wheels"), KeyError("fusion.7")])
def test_a_plan_that_cannot_be_made_stops_nothing(planned_training, monkeypatch, error):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(memory_check, "StepCompiler", broken)
    config, text = rapid.get_config(), io.StringIO()
    config.data.batch_size = 8192
    assert not memory_check.warn_if_too_large(config, FakeProgram(), Console(text), **planned_training)
    assert str(error) in text.getvalue() and "config.profile.plan=False" in text.getvalue()
    message = memory_check.ways_out_message(config, FakeProgram(), Console(text), **planned_training)
    assert "config.data.batch_size = 8192" in message and "smaller batch" in message


def test_out_of_memory_ends_with_ways_out(planned_training):
    config = rapid.get_config()
    config.data.batch_size = 8192
    assert memory_check.is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"))
    assert memory_check.is_out_of_memory(RuntimeError("INTERNAL: CUDNN_STATUS_ALLOC_FAILED"))
    assert not memory_check.is_out_of_memory(RuntimeError("INTERNAL: something else"))
    console = Console(io.StringIO())
    message = memory_check.ways_out_message(config, FakeProgram(), console, **planned_training)
    assert "config.data.batch_size = 8192" in message and "--config.train.remat=full" in message
    assert "see one part at a time" in message  # what accumulation changes
    no_gpu = {**planned_training, "gpu": None}
    assert "smaller batch" in memory_check.ways_out_message(config, FakeProgram(), console, **no_gpu)


def test_memory_that_should_do_is_looked_for_elsewhere(planned_training, monkeypatch):
    config, console = rapid.get_config(), Console(io.StringIO())
    config.data.batch_size = 512
    message = memory_check.ways_out_message(config, FakeProgram(), console, **planned_training)
    assert "nvidia-smi" in message and "MEM_FRACTION" not in message  # 75 % of the card is enough
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.05")
    message = memory_check.ways_out_message(config, FakeProgram(), console, **planned_training)
    assert "JAX takes 5 % of the card" in message and "MEM_FRACTION=0." in message
