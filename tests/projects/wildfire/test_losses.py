"""Losses of masks against closed forms and hand values, with unknown pixels, without positives, and sharded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.metrics import log_loss

from jepa_jax.config.schema import all_problems
from jepa_jax.projects.wildfire.losses import (
    AUTO_WEIGHT_LIMIT,
    MaskLossConfig,
    auto_weight,
    focal_loss,
    mask_loss,
    tversky_loss,
    weighted_bce,
)
from tests.tiny import tiny_config

RNG = np.random.default_rng(0)
SHAPE = (8, 5, 4, 1)
LOGITS = jnp.asarray(RNG.normal(0, 2, SHAPE), jnp.float32)
TARGET = jnp.asarray(RNG.random(SHAPE) < 0.2)
KNOWN = jnp.asarray(RNG.random(SHAPE) < 0.8)
ALL = jnp.ones(SHAPE, bool)
dice_loss = functools.partial(tversky_loss, fp=0.5, fn=0.5)
LOSSES = {"bce": weighted_bce, "dice": dice_loss, "focal": focal_loss, "tversky": tversky_loss}
EVERY_TERM = dataclasses.replace(MaskLossConfig(), bce=0.9, dice=0.1, focal=0.7, tversky=0.3)


def known_values():
    """Returns probabilities and truth of the known pixels, in float64."""
    known = np.asarray(KNOWN)
    return scipy.special.expit(np.asarray(LOGITS, np.float64)[known]), np.asarray(TARGET)[known]


def test_cross_entropy_is_the_log_loss_of_the_known_pixels():
    p, y = known_values()
    np.testing.assert_allclose(weighted_bce(LOGITS, TARGET, KNOWN, 1.0), log_loss(y, p), rtol=1e-5)
    weighted = log_loss(y, p, normalize=False, sample_weight=np.where(y, 3.0, 1.0)) / len(y)
    np.testing.assert_allclose(weighted_bce(LOGITS, TARGET, KNOWN, 3.0), weighted, rtol=1e-5)


def test_the_automatic_weight_is_negatives_per_positive_and_balances_the_gradient():
    _, y = known_values()
    np.testing.assert_allclose(auto_weight(TARGET, KNOWN), (~y).sum() / y.sum(), rtol=1e-6)
    # At probability 1/2 everywhere, both classes then pull equally: a constant logit of 0 is the optimum.
    slope = jax.grad(lambda bias: weighted_bce(jnp.zeros(SHAPE) + bias, TARGET, KNOWN))(0.0)
    assert abs(slope) < 1e-6


def test_the_automatic_weight_is_limited():
    one = jnp.zeros(1000, bool).at[0].set(True)
    assert auto_weight(one, jnp.ones(1000, bool)) == AUTO_WEIGHT_LIMIT
    assert auto_weight(~one, jnp.ones(1000, bool)) == pytest.approx(1 / AUTO_WEIGHT_LIMIT)


def test_focal_loss_equals_its_formula():
    p, y = known_values()
    right = np.where(y, p, 1 - p)
    expected = np.mean(-np.where(y, 0.25, 0.75) * (1 - right) ** 2 * np.log(right))
    np.testing.assert_allclose(focal_loss(LOGITS, TARGET, KNOWN), expected, rtol=1e-5)


def test_focal_loss_without_focus_is_half_the_cross_entropy():
    half = focal_loss(LOGITS, TARGET, KNOWN, alpha=0.5, gamma=0.0)
    np.testing.assert_allclose(2 * half, weighted_bce(LOGITS, TARGET, KNOWN, 1.0), rtol=1e-6)


def test_dice_and_tversky_are_one_ratio_of_sums_over_the_batch():
    p, y = known_values()
    tp, fp, fn = p[y].sum(), p[~y].sum(), (1 - p)[y].sum()
    np.testing.assert_allclose(
        tversky_loss(LOGITS, TARGET, KNOWN), 1 - (tp + 1) / (tp + 0.7 * fp + 0.3 * fn + 1), rtol=1e-5
    )
    np.testing.assert_allclose(dice_loss(LOGITS, TARGET, KNOWN), 1 - 2 * (tp + 1) / (p.sum() + y.sum() + 2), rtol=1e-5)
    each = [dice_loss(LOGITS[i : i + 1], TARGET[i : i + 1], KNOWN[i : i + 1]) for i in range(len(LOGITS))]
    assert abs(float(np.mean(each)) - dice_loss(LOGITS, TARGET, KNOWN)) > 1e-3


def test_tversky_by_hand():
    # Two sure hits, one sure false alarm, one sure miss: 1 - 3 / (2 + 0.7 + 0.3 + 1).
    logits = jnp.array([50.0, 50.0, 50.0, -50.0])
    target = jnp.array([True, True, False, True])
    np.testing.assert_allclose(tversky_loss(logits, target, jnp.ones(4, bool)), 0.25, rtol=1e-6)
    np.testing.assert_allclose(tversky_loss(logits, target, jnp.ones(4, bool), fp=0.0, fn=1.0), 0.25, rtol=1e-6)
    np.testing.assert_allclose(tversky_loss(logits, target, jnp.ones(4, bool), fp=1.0, fn=4.0), 5 / 8, rtol=1e-6)


def test_a_mix_is_the_weighted_sum_of_its_terms_and_leaves_out_those_of_weight_zero():
    loss, terms = mask_loss(LOGITS, TARGET, KNOWN, EVERY_TERM)
    assert terms == {name: function(LOGITS, TARGET, KNOWN) for name, function in LOSSES.items()}
    np.testing.assert_allclose(loss, sum(getattr(EVERY_TERM, name) * term for name, term in terms.items()), rtol=1e-6)
    loss, terms = mask_loss(LOGITS, TARGET, KNOWN, MaskLossConfig())
    assert set(terms) == {"bce"} and loss == terms["bce"]
    fixed = dataclasses.replace(MaskLossConfig(), positive_weight=3.0)
    loss, _ = mask_loss(LOGITS, TARGET, KNOWN, fixed)
    assert loss == weighted_bce(LOGITS, TARGET, KNOWN, 3.0)


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_pixels_change_neither_value_nor_gradient(name):
    value_and_grad = jax.value_and_grad(LOSSES[name])
    value, slope = value_and_grad(LOGITS, TARGET, KNOWN)
    other, other_slope = value_and_grad(jnp.where(KNOWN, LOGITS, jnp.nan), TARGET ^ ~KNOWN, KNOWN)
    np.testing.assert_array_equal(value, other)
    np.testing.assert_array_equal(slope, other_slope)
    assert not np.any(slope[~KNOWN]) and np.all(slope[KNOWN])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("target", [TARGET, ~ALL, ALL], ids=["some", "none", "all"])
@pytest.mark.parametrize("known", [KNOWN, ~ALL], ids=["some known", "none known"])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_values_and_gradients_are_finite_whatever_the_batch_holds(name, target, known, scale):
    value, slope = jax.value_and_grad(LOSSES[name])(scale * LOGITS, target, known)
    assert np.isfinite(value) and np.isfinite(slope).all()
    if not known.any():
        assert value == 0 and not slope.any()


def test_losses_of_bfloat16_logits_are_computed_in_float32():
    for loss in LOSSES.values():
        half = LOGITS.astype(jnp.bfloat16)
        assert loss(half, TARGET, KNOWN).dtype == jnp.float32
        assert loss(half, TARGET, KNOWN) == loss(half.astype(jnp.float32), TARGET, KNOWN)


def test_one_and_eight_devices_agree():
    # Devices hold different numbers of known and positive pixels: a mean of their losses would differ.
    def value(logits, target, known):
        return mask_loss(logits, target, known, EVERY_TERM)[0]

    whole = jax.value_and_grad(value)(LOGITS, TARGET, KNOWN)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    parts = (jax.device_put(array, sharding) for array in (LOGITS, TARGET, KNOWN))
    for a, b in zip(whole, jax.jit(jax.value_and_grad(value))(*parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-8)


def test_a_loss_without_terms_is_a_problem_of_the_config():
    config = tiny_config()
    assert list(all_problems(MaskLossConfig(), config)) == []
    (problem,) = all_problems(dataclasses.replace(MaskLossConfig(), bce=0.0), config)
    assert problem.key == "method.loss.bce" and "weight 0" in problem.why
