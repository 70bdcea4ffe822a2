"""Optimizers against the reference's updates, schedules against their closed forms."""

import dataclasses
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.base.errors import UserError
from jepa_jax.methods import schedules
from jepa_jax.methods.contract import ParamGroup
from jepa_jax.program import optim
from jepa_jax.program.config import changed_config
from tests.tiny import tiny_config

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "eb_jepa.npz")
CONFIG = types.SimpleNamespace(
    name="sgd", lr=0.1, weight_decay=0.0, weight_decay_end=0.0, warmup_epochs=0.0, warmup_lr=0.0, end_lr=0.0,
    batch_scaling="none", reference_batch=256, momentum=0.0, nesterov=False, beta1=0.9, beta2=0.999, clip_norm=0.0,
    larc_trust=0.02, larc_clip=True, decay_all=False, probe_lr=0.5, probe_weight_decay=0.0, layer_decay=1.0,
    schedule="cosine",
)  # fmt: skip


def compiled(tx):
    """Returns a transformation whose update is one program instead of one for each operation."""
    return optax.GradientTransformation(tx.init, jax.jit(tx.update))


def test_twelve_larc_steps_equal_the_reference():
    rates = jnp.asarray(GOLDEN["lars_lr"])
    rate = lambda count: rates[count]  # noqa: E731
    tx = compiled(optax.chain(optim.scale_by_larc(rate), optax.trace(0.9), optax.scale_by_learning_rate(rate)))
    params = {"w": jnp.asarray(GOLDEN["lars_w0"]), "b": jnp.asarray(GOLDEN["lars_b0"])}
    state = tx.init(params)
    for i in range(12):
        updates, state = tx.update({"w": GOLDEN["lars_gw"][i], "b": GOLDEN["lars_gb"][i]}, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["w"], GOLDEN["lars_w"][i], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(params["b"], GOLDEN["lars_b"][i], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("every", [False, True])
def test_lars_scales_every_step_to_a_share_of_the_weight(every):
    """Without the clip a matrix moves by lr * trust * |w| / (|g| + decay |w|) (g + decay w), at any rate."""
    w, g = (np.random.default_rng(0).normal(size=(2, 4, 3)) * np.float32([[[5]], [[1e-3]]])).astype(np.float32)
    params, gradients = {"w": w, "b": w[0]}, {"w": g, "b": g[0]}
    rule = optim.scale_by_larc(lambda count: 1e-4, trust=0.01, weight_decay=0.1, clip=False, every=every)
    updates, _ = rule.update(gradients, rule.init(params), params)

    def scaled(w, g):
        length = np.linalg.norm(w)
        return (g + 0.1 * w) * 0.01 * length / (np.linalg.norm(g) + 0.1 * length)

    np.testing.assert_allclose(updates["w"], scaled(w, g), rtol=1e-5)
    np.testing.assert_allclose(updates["b"], scaled(w[0], g[0]) if every else g[0], rtol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_decay_can_reach_biases_and_norms(name):
    config, zeros = optim_group(name, lr=0.1, weight_decay=0.5, decay_all=True, warmup_lr=0.1), {"bias": jnp.zeros(3)}
    tx, _ = optim.make_optimizer(config, batch_size=16, steps_per_epoch=10, total_steps=100, exempt=["bias"])
    params = {"model": {"bias": jnp.ones(3)}, "probe": {"kernel": jnp.ones((2, 2))}}
    gradients = {"model": zeros, "probe": {"kernel": jnp.zeros((2, 2))}}
    updates, _ = tx.update(gradients, tx.init(params), params)
    np.testing.assert_allclose(updates["model"]["bias"], -0.05, rtol=1e-5)
    with pytest.raises(UserError, match="optim.decay_all"):
        optim_group("muon", decay_all=True)


@settings(max_examples=30)
@given(peak=st.floats(1e-3, 2), warmup=st.integers(1, 50), rest=st.integers(2, 200), start=st.floats(0, 1e-4))
def test_warmup_cosine_starts_low_peaks_once_and_ends_at_its_end(peak, warmup, rest, start):
    total = warmup + rest
    schedule = schedules.warmed_up(schedules.cosine(peak, 0.0, rest), start, peak, warmup)
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


class Table(nnx.Module):
    def __init__(self, rngs):
        self.pos_embed = nnx.Param(jnp.ones((3, 4)), decay=False)
        self.heads = nnx.LinearGeneral(4, (2, 2), rngs=rngs)  # whose bias has two dimensions
        self.norms = nnx.vmap(lambda rngs: nnx.LayerNorm(4, rngs=rngs))(rngs.fork(split=2))
        self.codes = nnx.Param(jnp.ones((3, 4)))


def test_what_a_module_declares_norms_and_biases_do_not_decay():
    model = Table(nnx.Rngs(0))
    mask = optim.decay_mask({"model": nnx.to_pure_dict(nnx.state(model, nnx.Param))}, optim.undecayed(model))
    assert mask["model"] == {
        "pos_embed": False,
        "heads": {"kernel": True, "bias": False},
        "norms": {"scale": False, "bias": False},
        "codes": True,
    }


def rates_of(schedule, **keys):
    config = types.SimpleNamespace(
        **{**vars(CONFIG), "warmup_epochs": 1.0, "end_lr": 0.02, "schedule": schedule, **keys}
    )
    rate = optim.make_optimizer(config, batch_size=256, steps_per_epoch=10, total_steps=50)[1]
    return [float(rate(step)) for step in (0, 5, 10, 30, 40, 45, 50)]


def test_schedules_after_the_warm_up():
    assert rates_of("constant") == pytest.approx([0, 0.05, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert rates_of("linear") == pytest.approx([0, 0.05, 0.1, 0.06, 0.04, 0.03, 0.02])
    assert rates_of("wsd", decay_fraction=0.2) == pytest.approx([0, 0.05, 0.1, 0.1, 0.1, 0.06, 0.02])


def test_weight_decay_follows_its_cosine():
    config = types.SimpleNamespace(**{**vars(CONFIG), "weight_decay": 0.04, "weight_decay_end": 0.4})
    tx, rate = optim.make_optimizer(config, batch_size=256, steps_per_epoch=10, total_steps=4)
    params = {"model": {"kernel": jnp.ones((2, 2))}, "probe": {}}
    tx, state = compiled(tx), tx.init(params)
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


def optim_group(name, **keys):
    changes = {"optim.name": name, "optim.warmup_epochs": 0.0, **{f"optim.{key}": value for key, value in keys.items()}}
    return changed_config(tiny_config(), changes).optim


def first_update(config, params, gradients, groups=()):
    length = dict(batch_size=16, steps_per_epoch=10, total_steps=100)
    tx, _ = optim.make_optimizer(config, **length, groups=groups, exempt=["position"])
    updates, _ = compiled(tx).update({"model": gradients}, tx.init({"model": params}), {"model": params})
    return updates["model"]


@pytest.mark.parametrize("scaling, factor", [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_rates_of_groups_scale_with_the_batch_like_the_others(scaling, factor):
    groups = (ParamGroup("^own/", lr=0.3), ParamGroup("^constant/", lr=0.2, constant=True))
    config = optim_group("sgd", lr=0.1, weight_decay=0.0, batch_scaling=scaling, reference_batch=4)  # batches of 16
    params = {name: {"kernel": jnp.ones((2, 2))} for name in ("own", "constant", "rest")}
    updates = first_update(config, params, params, groups)
    np.testing.assert_allclose(
        [updates[name]["kernel"][0, 0] for name in params], [-0.3 * factor, -0.2 * factor, -0.1 * factor], rtol=1e-5
    )


def test_the_schedule_of_a_group_is_in_proportion_to_that_of_the_model():
    """A tenth of the rate in warm-up, at the peak and at the end; a rate of 0 never moves anything."""
    config = optim_group("sgd", lr=0.1, weight_decay=0.0, weight_decay_end=0.0, momentum=0.0)
    config = dataclasses.replace(config, warmup_epochs=0.3, warmup_lr=0.02, end_lr=0.05)
    groups = (ParamGroup("^own/", lr=0.01), ParamGroup("^never/", lr=0.0))
    tx, rate = optim.make_optimizer(config, batch_size=16, steps_per_epoch=10, total_steps=8, groups=groups)
    params = {"model": {name: {"kernel": jnp.ones((2, 2))} for name in ("rest", "own", "never")}}
    tx, state, seen = compiled(tx), tx.init(params), []
    for _ in range(10):
        updates, state = tx.update(params, state, params)
        seen.append([float(updates["model"][name]["kernel"][0, 0]) for name in params["model"]])
    rest, own, never = np.array(seen).T
    np.testing.assert_allclose(rest, -np.array([rate(step) for step in range(10)]), rtol=1e-5)
    assert rate(0) == pytest.approx(0.02) and rate(9) == pytest.approx(0.05)
    np.testing.assert_allclose(own, rest / 10, rtol=1e-5)
    assert not never.any()


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_what_is_frozen_does_not_decide_how_far_the_rest_is_clipped(name):
    """For two steps the clipped norm is that of what moves, then that of all: 3-4-5 triangles."""
    momentum = {"momentum": 0.0} if name == "sgd" else {}
    config = optim_group(name, lr=1.0, weight_decay=0.0, clip_norm=1.0, **momentum)
    groups = (ParamGroup("^late/", frozen_steps=2), ParamGroup("^still/", frozen_steps=-1))
    tx, rate = optim.make_optimizer(config, batch_size=16, steps_per_epoch=10, total_steps=100, groups=groups)
    gradients = {"model": {"rest": jnp.array([3.0]), "late": {"b": jnp.array([4.0])}, "still": {"b": jnp.array([9.0])}}}
    params = jax.tree.map(jnp.ones_like, gradients)
    tx, state = compiled(tx), tx.init(params)
    for step in range(4):
        updates, state = tx.update(gradients, state, params)
        late, rest = (-float(jax.tree.leaves(updates["model"][part])[0][0] / rate(step)) for part in ("late", "rest"))
        assert not updates["model"]["still"]["b"].any()
        if name == "sgd":
            assert (rest, late) == pytest.approx((1.0, 0.0) if step < 2 else (0.6, 0.8), rel=1e-5)
        else:  # moments of what was frozen are warm: its first step is as long as any other
            assert late == pytest.approx(0.0 if step < 2 else 1.0, rel=1e-3)


@pytest.mark.parametrize("clip_norm", [0.0, 5.0])
def test_a_group_with_a_clip_of_its_own_is_clipped_apart_from_the_rest(clip_norm):
    """The norm of "late" and "rest" is that of a 6-8-10 triangle, of two groups with clips their own."""
    config = optim_group("sgd", lr=1.0, weight_decay=0.0, clip_norm=clip_norm, momentum=0.0)
    groups = (ParamGroup("^own/", clip=2.0), ParamGroup("^short/", clip=2.0), ParamGroup("^late/", frozen_steps=1))
    tx, rate = optim.make_optimizer(config, batch_size=16, steps_per_epoch=10, total_steps=100, groups=groups)
    values = {"own": 30.0, "short": 1.0, "late": 8.0, "rest": 6.0}
    gradients = {"model": {name: {"a": jnp.array([value])} for name, value in values.items()}}
    gradients["model"]["own"]["b"] = jnp.array([40.0])  # 30-40-50
    params = jax.tree.map(jnp.ones_like, gradients)
    tx, state = compiled(tx), tx.init(params)
    for step in range(2):
        updates, state = tx.update(gradients, state, params)
        moved = {name: -float(updates["model"][name]["a"][0] / rate(step)) for name in values}
        assert moved["own"] == pytest.approx(1.2, rel=1e-5) and moved["short"] == pytest.approx(1.0, rel=1e-5)
        rest, late = (5.0, 0.0) if step < 1 else (3.0, 4.0)
        expected = (rest, late) if clip_norm else (6.0, 0.0 if step < 1 else 8.0)
        assert (moved["rest"], moved["late"]) == pytest.approx(expected, rel=1e-5)


def test_muon_turns_the_gradient_of_a_kernel_into_a_nearly_orthogonal_matrix():
    """A convolution is the matrix [kh kw inputs, outputs]; what is no kernel moves by Adam, whose first step is lr."""
    config = optim_group("muon", lr=0.1, weight_decay=0.0, update_rms=1.0, adam_lr_factor=0.5)
    rng = np.random.default_rng(0)
    shapes = {"dense": {"kernel": (24, 8), "bias": (8,)}, "conv": {"kernel": (3, 3, 2, 8)}, "position": (1, 4, 8)}
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    gradients = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    updates = first_update(config, params, gradients)
    for layer, inputs in (("dense", 24), ("conv", 18)):
        matrix = -np.asarray(updates[layer]["kernel"]).reshape(inputs, 8) / (0.1 * np.sqrt(inputs))
        u, _, v = np.linalg.svd(np.asarray(gradients[layer]["kernel"]).reshape(inputs, 8), full_matrices=False)
        sizes = np.diag(u.T @ matrix @ v.T)
        assert np.all((sizes > 0.65) & (sizes < 1.25))  # the iteration ends near 1, not at 1
        np.testing.assert_allclose(u.T @ matrix @ v.T, np.diag(sizes), atol=2e-4)  # with the gradient's directions
    signs = np.sign(gradients["dense"]["bias"]), np.sign(gradients["position"])
    np.testing.assert_allclose(updates["dense"]["bias"], -0.05 * signs[0], rtol=1e-3)
    np.testing.assert_allclose(updates["position"], -0.05 * signs[1], rtol=1e-3)


def test_muon_decays_kernels_and_obeys_groups():
    groups = (ParamGroup("^still/", frozen_steps=-1), ParamGroup("^late/", frozen_steps=1), ParamGroup("^own/", lr=0.3))
    params = {name: {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)} for name in ("still", "late", "own", "rest")}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = first_update(optim_group("muon", lr=0.1, weight_decay=0.5), params, zeros, groups)
    np.testing.assert_allclose([updates[name]["kernel"][0, 0] for name in params], [0, 0, -0.15, -0.05], rtol=1e-5)
    assert not any(updates[name]["bias"].any() for name in params)


@pytest.mark.parametrize("groups", [(), (ParamGroup("^still/", frozen_steps=-1), ParamGroup("^own/", lr=0.1))])
def test_schedule_free_follows_the_published_recursion_on_a_quadratic(groups):
    """Defazio et al., "The Road Less Scheduled", algorithm 1, on the loss sum (w - 1)^2 / 2 with decay and warm-up."""
    rate, beta1, beta2, decay = 0.2, 0.8, 0.9, 0.1
    config = optim_group("schedule_free_adamw", lr=rate, beta1=beta1, beta2=beta2, weight_decay=decay)
    config = dataclasses.replace(config, warmup_epochs=0.3, warmup_lr=0.05)
    tx, rates = optim.make_optimizer(config, batch_size=16, steps_per_epoch=10, total_steps=20, groups=groups)
    start = np.array([[3.0, -2.0]], np.float32)
    params = {"model": {name: {"kernel": jnp.asarray(start)} for name in ("rest", "still", "own")}}
    tx, state = compiled(tx), tx.init(params)
    z, x, second, weights = start, start, 0.0, 0.0
    for step in range(20):
        y = (1 - beta1) * z + beta1 * x
        np.testing.assert_allclose(params["model"]["rest"]["kernel"], y, rtol=1e-4, atol=1e-5)
        gradient = y - 1
        second = beta2 * second + (1 - beta2) * gradient**2
        lr = [0.05, 0.1, 0.15, rate][min(step, 3)]
        assert rates(step) == pytest.approx(lr)
        z = z - lr * (gradient / (np.sqrt(second / (1 - beta2 ** (step + 1))) + 1e-8) + decay * y)
        weights += lr**2
        x = (1 - lr**2 / weights) * x + lr**2 / weights * z
        updates, state = tx.update(jax.tree.map(lambda w: w - 1, params), state, params)
        params = optax.apply_updates(params, updates)
    averaged = optim.averaged_params(params["model"], state)
    np.testing.assert_allclose(averaged["rest"]["kernel"], x, rtol=1e-4, atol=1e-5)
    assert np.abs(x - np.asarray(params["model"]["rest"]["kernel"])).max() > 1e-3
    if groups:
        np.testing.assert_array_equal(params["model"]["still"]["kernel"], start)
        np.testing.assert_allclose(averaged["still"]["kernel"], start, rtol=1e-6)
        assert np.abs(averaged["own"]["kernel"] - averaged["rest"]["kernel"]).max() > 1e-3


@pytest.mark.parametrize("name", ["muon", "schedule_free_adamw"])
def test_clipping_bounds_what_the_rule_sees(name):
    """Both rules are blind to the scale of one gradient, not to that of the next one beside it."""

    def second_update(clip_norm, size):
        tx, _ = optim.make_optimizer(
            optim_group(name, clip_norm=clip_norm, weight_decay=0.0), batch_size=16, steps_per_epoch=10, total_steps=100
        )
        params = {"model": {"kernel": jnp.ones((2, 2))}}
        _, state = tx.update({"model": {"kernel": jnp.eye(2)}}, tx.init(params), params)
        return tx.update({"model": {"kernel": size * jnp.array([[0.0, 1.0], [-1.0, 0.5]])}}, state, params)[0]["model"][
            "kernel"
        ]

    np.testing.assert_allclose(second_update(1.0, 10.0), second_update(1.0, 1000.0), rtol=1e-4)
    assert np.abs(second_update(0.0, 10.0) - second_update(0.0, 1000.0)).max() > 1e-5


def test_keys_of_other_schedules_are_refused():
    with pytest.raises(UserError, match=r"config.optim.end_lr = 0.01: schedule_free_adamw averages instead"):
        optim_group("schedule_free_adamw", end_lr=0.01)
    with pytest.raises(UserError, match=r"config.optim.weight_decay_end: only read with optim.name = adamw or"):
        optim_group("schedule_free_adamw", weight_decay_end=0.1)
    with pytest.raises(UserError, match=r"config.optim.beta1 = 0: must be at least 0.01"):
        optim_group("schedule_free_adamw", beta1=0)


def test_schedule_free_needs_calibrated_batch_statistics():
    """Running statistics belong to the weights of the last gradient, evaluations read an average of weights."""
    for model in ({"model.name": "resnet10"}, {}):
        with pytest.raises(UserError, match=r"config.eval.calibration_images = 0: schedule_free_adamw evaluates av"):
            changed_config(tiny_config(), {"optim.name": "schedule_free_adamw", "eval.calibration_images": 0, **model})
    vit = {"model.name": "vit_tiny", "model.patch_size": 4, "eval.calibration_images": 0}
    changed_config(tiny_config(), {"optim.name": "schedule_free_adamw", **vit})


def test_layer_decay_scales_the_rate_of_each_block_by_those_that_follow():
    config = optim_group("sgd", lr=1.0, weight_decay=0.0, layer_decay=0.5, warmup_lr=1.0)
    encoder = {name: {"x": jnp.ones(2)} for name in ("patch_embed", "position", "norm")}
    params = {"encoder": encoder | {"blocks": {0: {"x": jnp.ones(2)}, 1: {"x": jnp.ones(2)}}}}
    params["predictor"] = {"blocks": {0: {"x": jnp.ones(2)}}}
    scales = jax.tree.map(lambda update: -update[0], first_update(config, params, params))
    own = scales["encoder"]
    assert float(scales["predictor"]["blocks"][0]["x"]) == float(own["norm"]["x"]) == 1
    assert [float(own["blocks"][i]["x"]) for i in (1, 0)] == [0.5, 0.25]
    assert [float(own[name]["x"]) for name in ("patch_embed", "position")] == [0.125, 0.125]
    with pytest.raises(UserError, match="layer_decay = 0.5: this encoder has no blocks"):
        first_update(config, {"encoder": encoder}, {"encoder": encoder})


@pytest.mark.parametrize("sizes", [[3, 5], [20_000, 3], [40_000], []])
def test_the_norm_of_large_and_small_leaves_is_that_of_all_numbers(sizes):
    leaves = [jax.random.normal(jax.random.key(i), (n,)) for i, n in enumerate(sizes)]
    expected = np.linalg.norm(np.concatenate([*leaves, np.zeros(1)]))
    np.testing.assert_allclose(optim.global_norm(leaves), expected, rtol=1e-6)
    np.testing.assert_allclose(optim.global_norm([leaf.reshape(1, -1) for leaf in leaves]), expected, rtol=1e-6)
