"""Optimizers against the reference's updates, schedules against their closed forms."""

import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.methods import schedules
from jepa_jax.program import optim

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "eb_jepa.npz")
CONFIG = types.SimpleNamespace(
    name="sgd", lr=0.1, weight_decay=0.0, weight_decay_end=0.0, warmup_epochs=0.0, warmup_lr=0.0, end_lr=0.0,
    batch_scaling="none", reference_batch=256, momentum=0.0, nesterov=False, beta1=0.9, beta2=0.999, clip_norm=0.0,
    larc_trust=0.02, probe_lr=0.5, probe_weight_decay=0.0,
)  # fmt: skip


def test_twelve_larc_steps_equal_the_reference():
    rates = jnp.asarray(GOLDEN["lars_lr"])
    rate = lambda count: rates[count]  # noqa: E731
    tx = optax.chain(optim.scale_by_larc(rate), optax.trace(0.9), optax.scale_by_learning_rate(rate))
    params = {"w": jnp.asarray(GOLDEN["lars_w0"]), "b": jnp.asarray(GOLDEN["lars_b0"])}
    state = tx.init(params)
    for i in range(12):
        updates, state = tx.update({"w": GOLDEN["lars_gw"][i], "b": GOLDEN["lars_gb"][i]}, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["w"], GOLDEN["lars_w"][i], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(params["b"], GOLDEN["lars_b"][i], rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(peak=st.floats(1e-3, 2), warmup=st.integers(1, 50), rest=st.integers(2, 200), start=st.floats(0, 1e-4))
def test_warmup_cosine_starts_low_peaks_once_and_ends_at_its_end(peak, warmup, rest, start):
    total = warmup + rest
    schedule = schedules.warmup_cosine(peak, warmup_steps=warmup, total_steps=total, start=start)
    values = np.array(schedule(jnp.arange(256)))  # one shape, so that nothing compiles anew
    assert values[0] == pytest.approx(start, abs=1e-7)
    assert np.argmax(values) == warmup and values[warmup] == pytest.approx(peak, rel=1e-5)
    assert values[total] == pytest.approx(0, abs=1e-6)
    assert (np.diff(values[: warmup + 1]) >= -1e-7).all() and (np.diff(values[warmup : total + 1]) <= 1e-7).all()
    middle = peak * 0.5 * (1 + np.cos(np.pi * (rest // 2) / rest))
    assert values[warmup + rest // 2] == pytest.approx(middle, rel=1e-4, abs=1e-7)


def test_the_first_update_runs_at_the_warm_up_rate_not_the_peak():
    config = types.SimpleNamespace(**{**vars(CONFIG), "warmup_epochs": 1.0, "warmup_lr": 3e-5})
    tx, rate = optim.make_optimizer(config, batch_size=256, steps_per_epoch=10, total_steps=100)
    params = {"model": {"kernel": jnp.ones((2, 2))}, "probe": {"kernel": jnp.ones((2, 2))}}
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["model"]["kernel"], -3e-5, rtol=1e-5)
    assert float(rate(10)) == pytest.approx(0.1)


def test_the_probe_keeps_its_own_rate():
    tx, _ = optim.make_optimizer(CONFIG, batch_size=256, steps_per_epoch=10, total_steps=100)
    params = {"model": {"kernel": jnp.ones((2, 2))}, "probe": {"kernel": jnp.ones((2, 2))}}
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["model"]["kernel"], -0.1, rtol=1e-5)
    np.testing.assert_allclose(updates["probe"]["kernel"], -0.5, rtol=1e-4)  # Adam's first step has length lr


@pytest.mark.parametrize("scaling, factor", [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_batch_scaling(scaling, factor):
    assert optim.scaled_learning_rate(0.3, 1024, scaling, 256) == pytest.approx(0.3 * factor)


def test_only_kernels_decay():
    names = ("kernel", "bias", "scale", "position")
    params = {"layer": {name: jnp.ones((2, 2)) for name in names}, "norm": {"scale": jnp.ones(2)}}
    assert optim.decay_mask(params) == {
        "layer": {"kernel": True, "bias": False, "scale": False, "position": False},
        "norm": {"scale": False},
    }


def test_weight_decay_follows_its_cosine():
    config = types.SimpleNamespace(**{**vars(CONFIG), "weight_decay": 0.04, "weight_decay_end": 0.4})
    tx, rate = optim.make_optimizer(config, batch_size=256, steps_per_epoch=10, total_steps=4)
    params = {"model": {"kernel": jnp.ones((2, 2))}, "probe": {}}
    state = tx.init(params)
    decays = []
    for step in range(5):
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        if rate(step) > 0:
            decays.append(float(-updates["model"]["kernel"][0, 0] / rate(step)))
    np.testing.assert_allclose(decays[:4], [0.04 + 0.36 * (1 - np.cos(np.pi * s / 4)) / 2 for s in range(4)], rtol=1e-4)


def test_ema_of_a_constant_converges_geometrically():
    target, online = {"w": jnp.zeros(3)}, {"w": jnp.ones(3)}
    for _ in range(10):
        target = optim.ema_update(target, online, 0.9)
    np.testing.assert_allclose(target["w"], 1 - 0.9**10, rtol=1e-5)
