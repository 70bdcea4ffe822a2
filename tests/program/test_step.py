"""The training step: the same on any number of devices, in parts, and with parameters split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.methods.contract import Output, Pretrained
from jepa_jax.program.config import changed_config
from jepa_jax.program.optim import averaged_params
from jepa_jax.program.step import compiler_options, evaluated_variables, fsdp_spec, pooled_statistics
from jepa_jax.program.step_metrics import StepMetrics
from tests.sequence_methods import LineMethod
from tests.stepping import BATCH, IMAGES, STILL, assert_close, build_program, mesh_of, take_steps
from tests.tiny import tiny_config


class Loading(LineMethod):
    """A kernel [1, 1] and a bias [1], of which some was trained elsewhere."""


LINE = tiny_config(method__name="tests.sequence_methods:LineMethod", data__source="tests.sequences:SequenceSource")
LOADING = tiny_config(method__name=f"{__name__}:Loading", data__source="tests.sequences:SequenceSource")
SEQUENCES = {"frames": np.ones((16, 8, 8, 1), np.float32), "length": np.ones(16, np.int32)}
PLAIN = {"optim__name": "sgd", "optim__lr": 0.05, "optim__warmup_lr": 0.05}


@pytest.fixture(scope="module")
def labelled():
    """A program with labels and SGD: rules that divide by the size of gradients make large steps of rounding errors."""
    return build_program(tiny_config(**PLAIN))


@pytest.mark.slow
def test_splitting_parameters_changes_nothing():
    config = tiny_config(method__projector=(256, 256))
    whole, _ = take_steps(config, mesh_of(1, 1))
    split, _ = take_steps(config, mesh_of(2, 4))
    assert_close(whole.params, split.params)


def test_fsdp_splits_the_widest_axis_that_divides():
    mesh = mesh_of(1, 8)
    assert tuple(fsdp_spec((512, 2048), mesh)) == (None, "fsdp")
    assert tuple(fsdp_spec((3, 3, 512, 513), mesh)) == (None, None, "fsdp", None)
    assert tuple(fsdp_spec((64,), mesh)) == ()


def test_accumulating_equal_parts_equals_one_of_them():
    # Two parts with the same images: a batch loss and batch norm then see the same statistics as one part alone.
    config = changed_config(tiny_config(method__loss="vicreg"), STILL)  # no random slices, which differ by part
    half = IMAGES[:8]

    def one_step(images, labels, parts):
        program = build_program(changed_config(config, {"train.accum_steps": parts, "train.accum": "mean"}))
        batch = {"image": images, "label": labels}
        return jax.device_get(program.train_step(program.factory.create(0, BATCH), batch))

    labels = np.arange(8, dtype=np.int32)
    whole_state, whole = one_step(half, labels, 1)
    parts_state, parts = one_step(np.repeat(half, 2, axis=0), np.repeat(labels, 2), 2)
    assert_close(whole["loss"], parts["loss"])
    assert_close(whole["grad_norm"], parts["grad_norm"])
    assert_close(whole_state.params, parts_state.params)


def test_the_step_donates_its_state_and_does_not_compile_again(labelled):
    step = labelled.train_step
    first = labelled.factory.create(0, BATCH)
    second, _ = step(first, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))
    step(second, BATCH)
    assert step._cache_size() == 1


def test_labels_reach_the_probe_alone(labelled):
    factory, step = labelled.factory, labelled.train_step
    right, _ = step(factory.create(0, BATCH), BATCH)
    wrong, _ = step(factory.create(0, BATCH), {**BATCH, "label": (BATCH["label"] + 1) % 10})
    jax.tree.map(np.testing.assert_array_equal, right.params["model"], wrong.params["model"])
    assert not jnp.array_equal(right.params["probe"]["kernel"], wrong.params["probe"]["kernel"])


def test_without_labels_there_is_no_probe_and_the_model_learns_the_same(labelled):
    unlabelled = build_program(tiny_config(**PLAIN), batch={"image": IMAGES})
    with_labels, _ = labelled.train_step(labelled.factory.create(0, BATCH), BATCH)
    without, metrics = unlabelled.train_step(unlabelled.factory.create(0, {"image": IMAGES}), {"image": IMAGES})
    assert "probe" not in without.params and "probe_loss" not in metrics
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)  # two programs round differently
    jax.tree.map(close, with_labels.params["model"], without.params["model"])


@pytest.mark.parametrize("name", ["adamw", "muon", "schedule_free_adamw"])
def test_evaluations_read_the_average_of_a_schedule_free_run_and_the_last_parameters_of_others(name):
    program = build_program(changed_config(LINE, {"optim.name": name, "optim.warmup_lr": 1e-2}), batch=SEQUENCES)
    state = program.factory.create(0, SEQUENCES)
    for _ in range(3):
        state, metrics = program.train_step(state, SEQUENCES)
    assert np.isfinite(metrics["loss"]) and metrics["update_norm"] > 0
    with jax.transfer_guard("disallow"):  # as between the steps of a run
        params, stats = evaluated_variables(state, "online")
    last = state.params["model"]
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), params, last)
    assert all(jax.tree.leaves(same)) == (name != "schedule_free_adamw") and stats is state.stats
    jax.tree.map(np.testing.assert_array_equal, params, averaged_params(last, state.opt_state))


def test_statistics_of_batches_pool_to_those_of_all_their_images():
    x = np.random.default_rng(0).normal(size=(4, 8, 3)) + np.arange(4)[:, None, None]  # batches with other means
    each = [{"norm": {"mean": part.mean(0), "var": part.var(0)}} for part in x]
    pooled = pooled_statistics(each)["norm"]
    np.testing.assert_allclose(pooled["mean"], x.reshape(32, 3).mean(0), rtol=1e-5)
    np.testing.assert_allclose(pooled["var"], x.reshape(32, 3).var(0), rtol=1e-5)


def test_variables_that_were_trained_elsewhere_replace_what_was_drawn(monkeypatch):
    drawn = build_program(LOADING, batch=SEQUENCES).factory.create(0, SEQUENCES)
    monkeypatch.setattr(Loading, "pretrained", Pretrained({"bias": np.full(1, 3.0, np.float32)}))
    state = build_program(LOADING, batch=SEQUENCES).factory.create(0, SEQUENCES)
    assert float(state.params["model"]["bias"][0]) == 3 != float(drawn.params["model"]["bias"][0])
    np.testing.assert_array_equal(state.params["model"]["kernel"], drawn.params["model"]["kernel"])


@pytest.mark.parametrize(
    "loaded, message",
    [
        (
            Pretrained({"kernal": np.ones((1, 1))}),
            r"Loading.pretrained.params/kernal: the model has no such variable; in this place it has bias, kernel",
        ),
        (
            Pretrained({"kernel": np.ones((3, 1))}),
            r"Loading.pretrained.params/kernel: is \(3, 1\) and the model has \(1, 1\)",
        ),
        (
            Pretrained({"kernel": {"kernel": np.ones((1, 1))}}),
            r"kernel: is several variables and the model has \(1, 1\)",
        ),
        (
            Pretrained(stats={"norm": {"mean": np.ones(3)}}),
            r"pretrained.stats/norm: the model has no .* it has nothing",
        ),
    ],
)
def test_variables_that_the_model_does_not_have_are_refused_before_anything_is_compiled(monkeypatch, loaded, message):
    monkeypatch.setattr(Loading, "pretrained", loaded)
    program = build_program(LOADING, batch=SEQUENCES)
    with pytest.raises(UserError, match=message):
        program.factory.create(0, SEQUENCES)


def test_metrics_are_one_array_and_a_mapping_of_scalars():
    metrics = jax.jit(lambda x: StepMetrics.of({"loss": x, "hits": 2 * x}))(jnp.float32(1.5))
    assert len(jax.tree.leaves(metrics)) == 1
    assert dict(metrics) == metrics.floats() == {"loss": 1.5, "hits": 3.0} and "other" not in metrics
    with pytest.raises(KeyError, match="other"):
        metrics["other"]


class Returning(LineMethod):
    """A method whose loss returns `result`."""

    result = None

    def loss(self, model, target, batch, key, step):
        return self.result(super().loss(model, target, batch, key, step).loss)


@pytest.mark.parametrize(
    "result, message",
    [
        (lambda loss: loss, "Returning.loss: returns .*Tracer; return Output"),
        (lambda loss: Output(loss, {"grad_norm": loss}), "the step has a metric 'grad_norm' of its own"),
        (lambda loss: Output(loss, {"loss": loss}), "the step has a metric 'loss' of its own"),
        (lambda loss: Output(loss, {"parts": jnp.ones(3)}), r"'parts' has the shape \(3,\); return a scalar"),
        (lambda loss: Output(jnp.ones(2) * loss, {}), r"'loss' has the shape \(2,\); return a scalar"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused_while_it_is_traced(monkeypatch, result, message):
    monkeypatch.setattr(Returning, "result", staticmethod(result))
    config = changed_config(LOADING, {"method.name": f"{__name__}:Returning"})
    program = build_program(config, batch=SEQUENCES)
    with pytest.raises(UserError, match=message):
        program.train_step.trace(program.factory.abstract, SEQUENCES)


def test_exchanges_overlap_on_several_gpus_alone():
    class Absent:
        platform = "cuda"

    class Gpus:
        size, devices = 8, np.array([Absent()] * 8)

    assert compiler_options(mesh_of(1)) == compiler_options(mesh_of(8)) == {}
    assert compiler_options(Gpus()) == {"xla_gpu_enable_latency_hiding_scheduler": True}
