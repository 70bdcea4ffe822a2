"""The training step: the same on any number of devices, in parts, and with parameters split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jepa_jax.program.build import build_program
from jepa_jax.program.step import fsdp_spec
from jepa_jax.runtime.mesh import BATCH_AXES
from tests.tiny import tiny_config

IMAGES = np.random.default_rng(0).integers(0, 256, (16, 16, 16, 3), np.uint8)
BATCH = {"image": IMAGES, "label": np.arange(16, dtype=np.int32) % 10}


def make_mesh(data, fsdp):
    devices = np.array(jax.devices()[: data * fsdp]).reshape(data, fsdp)
    return Mesh(devices, BATCH_AXES, axis_types=(AxisType.Auto,) * 2)


def build_step(config, mesh):
    """What makes the states of a config, and its compiled step."""
    program = build_program(config, num_train=96, num_classes=10, sample=IMAGES, mesh=mesh)
    return program.factory, program.train_step


def take_steps(config, mesh, steps=2):
    """Parameters and metrics after some steps of SGD, so that a difference of gradients is not hidden."""
    config.optim.name, config.optim.warmup_lr, config.optim.lr = "sgd", 0.05, 0.05
    factory, step = build_step(config, mesh)
    state = factory.create(0, IMAGES)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return jax.device_get(state), jax.device_get(metrics)


def assert_close(a, b, rtol=2e-3):
    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * 0.1)

    jax.tree.map(close, a, b)


@pytest.mark.parametrize("loss, together", [("vicreg", False), ("sigreg", True), ("infonce", True)])
def test_one_device_and_eight_take_the_same_steps(loss, together):
    config = tiny_config(
        method__loss=loss, method__per_view_statistics=not together, model__widths=(8, 16), method__views=2
    )
    one_state, one_metrics = take_steps(config, make_mesh(1, 1))
    eight_state, eight_metrics = take_steps(config, make_mesh(8, 1))
    assert_close(one_metrics, eight_metrics)
    assert_close(one_state.params, eight_state.params)
    assert_close(one_state.stats, eight_state.stats)


def test_splitting_parameters_changes_nothing():
    config = tiny_config(method__projector=(256, 256))
    whole, _ = take_steps(config, make_mesh(1, 1))
    split, _ = take_steps(config, make_mesh(2, 4))
    assert_close(whole.params, split.params)


def test_fsdp_splits_the_widest_axis_that_divides():
    mesh = make_mesh(1, 8)
    assert tuple(fsdp_spec((512, 2048), mesh)) == (None, "fsdp")
    assert tuple(fsdp_spec((3, 3, 512, 513), mesh)) == (None, None, "fsdp", None)
    assert tuple(fsdp_spec((64,), mesh)) == ()


def test_accumulating_equal_parts_equals_one_of_them():
    # Two parts with the same images: a batch loss and batch norm then see the same statistics as one part alone.
    config = tiny_config(method__loss="vicreg")  # no random slices, which differ from part to part
    for operation in ("crop", "flip", "jitter", "grayscale", "solarize"):
        config.data.augment[operation].probability = 0.0
    half = IMAGES[:8]

    def one_step(images, labels, parts):
        config.train.accum_steps = parts
        factory, step = build_step(config, make_mesh(1, 1))
        return jax.device_get(step(factory.create(0, IMAGES), {"image": images, "label": labels}))

    labels = np.arange(8, dtype=np.int32)
    whole_state, whole = one_step(half, labels, 1)
    parts_state, parts = one_step(np.repeat(half, 2, axis=0), np.repeat(labels, 2), 2)
    assert_close(whole["loss"], parts["loss"])
    assert_close(whole["grad_norm"], parts["grad_norm"])
    assert_close(whole_state.params, parts_state.params)


def test_the_step_donates_its_state_and_does_not_compile_again():
    factory, step = build_step(tiny_config(), make_mesh(1, 1))
    first = factory.create(0, IMAGES)
    second, _ = step(first, BATCH)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))
    step(second, BATCH)
    assert step._cache_size() == 1


def test_labels_reach_the_probe_alone():
    factory, step = build_step(tiny_config(), make_mesh(1, 1))
    right, _ = step(factory.create(0, IMAGES), BATCH)
    wrong, _ = step(factory.create(0, IMAGES), {**BATCH, "label": (BATCH["label"] + 1) % 10})
    jax.tree.map(np.testing.assert_array_equal, right.params["model"], wrong.params["model"])
    assert not jnp.array_equal(right.params["probe"]["kernel"], wrong.params["probe"]["kernel"])
