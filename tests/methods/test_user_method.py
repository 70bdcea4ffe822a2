"""Methods and encoders of a user's own: keys, slow copies with their own statistics, rates by parameter group."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import NamedGroup
from jepa_jax.config.schema import Group, key
from jepa_jax.methods.contract import Output, ParamGroup
from jepa_jax.methods.image_method import ImageMethod
from jepa_jax.models.vit import ViT
from jepa_jax.program.config import changed_config
from jepa_jax.program.optim import group_labels, make_optimizer
from jepa_jax.program.step import make_statistics_step
from jepa_jax.program.variables import with_variables
from tests.stepping import BATCH, assert_close, build_program, mesh_of, take_steps
from tests.tiny import tiny_config, tiny_masked_config

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
SMALL = {"method__name": "byol:Byol", "method__projector": (16, 8), "method__predictor": 16}


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FIXTURES))


def test_its_keys_are_checked_and_have_defaults():
    config = tiny_config(**SMALL)
    assert config.method.ema_start == 0.99 and not hasattr(config.method, "loss")
    with pytest.raises(UserError, match=r"config.method.ema_start = 2.0: must be at least 0 and at most 1"):
        tiny_config(**SMALL, method__ema_start=2.0)
    with pytest.raises(UserError, match=r"config.method.predicor: unknown key; did you mean config.method.predictor"):
        tiny_config(**SMALL, method__predicor=3)
    with pytest.raises(UserError, match="this method keeps no copy of its encoder"):
        tiny_config(**SMALL | {"method__name": "byol:SimSiam"}, eval__weights="target")
    with pytest.raises(UserError, match=r"config.method.projector = \(\): needs at least one width"):
        tiny_config(**SMALL | {"method__projector": ()})


@dataclasses.dataclass(frozen=True)
class PlainKeys(NamedGroup):
    tau: float = 0.1


class UndecoratedKeys(NamedGroup):
    tau: float = key(0.1, "temperature")


class Plain(ImageMethod):
    Keys = PlainKeys


class Undecorated(ImageMethod):
    Keys = UndecoratedKeys


@pytest.mark.parametrize(
    "name, message",
    [
        (f"{__name__}:Plain", "config key tau: write its default as key"),
        (f"{__name__}:Undecorated", "UndecoratedKeys: no dataclass"),
        ("json:JSONDecoder", "this class has no attribute Keys"),
    ],
)
def test_mistakes_in_a_method_are_named(name, message):
    with pytest.raises(UserError, match=message):
        tiny_config(method__name=name)


def test_the_slow_copy_keeps_its_own_batch_statistics():
    program = build_program(tiny_config(**SMALL))
    state = program.factory.create(0, BATCH)
    jax.tree.map(np.testing.assert_array_equal, state.target_stats["encoder"], state.stats["encoder"])
    for _ in range(2):  # in the first one both networks are equal
        state, _ = program.train_step(state, BATCH)
    online, slow = (jax.tree.leaves(tree) for tree in (state.stats["projector"], state.target_stats["projector"]))
    assert any(not np.array_equal(a, b) for a, b in zip(online, slow, strict=True))
    assert set(state.target_stats) == {"encoder", "projector"}  # the predictor has no copy


@pytest.mark.slow
def test_one_device_and_eight_take_the_same_steps():
    one, one_metrics = take_steps(tiny_config(**SMALL), mesh_of(1))
    eight, eight_metrics = take_steps(tiny_config(**SMALL), mesh_of(8))
    assert_close(one_metrics, eight_metrics)
    assert_close(one.params, eight.params)
    assert_close(one.target_stats, eight.target_stats)


def test_a_group_of_parameters_has_its_own_rate():
    """The schedule starts at a rate of zero: only the predictor, whose rate is constant, moves in the first step."""
    config = tiny_config(**SMALL | {"method__name": "byol:SimSiam"}, method__predictor_lr=0.5)
    config = changed_config(config, {"optim.name": "sgd", "optim.momentum": 0.0, "optim.weight_decay": 0.0})
    config = changed_config(config, {"optim.weight_decay_end": 0.0, "optim.warmup_lr": 0.0, "optim.warmup_epochs": 1.0})
    program = build_program(config)
    state = program.factory.create(0, BATCH)
    before = jax.device_get(state.params["model"])
    after, _ = program.train_step(state, BATCH)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, jax.device_get(after.params["model"]))
    assert max(jax.tree.leaves(moved["encoder"])) == 0.0  # the schedule starts at zero
    assert max(jax.tree.leaves(moved["predictor"])) > 0.0


def test_groups_freeze_and_decay_by_pattern():
    groups = (ParamGroup("^a/", frozen_steps=2), ParamGroup("b", frozen_steps=-1), ParamGroup("c", weight_decay=0.5))
    params = {"model": {name: {"kernel": jnp.ones((2, 2))} for name in "abcd"}}
    with pytest.raises(UserError, match="no parameter is in this group"):
        group_labels(params["model"], (ParamGroup("^missing"),))
    labels = group_labels(params["model"], groups)
    assert {name: labels[name]["kernel"] for name in "abcd"} == {"a": "0", "b": "1", "c": "2", "d": ""}
    optim = changed_config(
        tiny_config(optim__name="sgd", optim__momentum=0.0, optim__lr=0.1, optim__warmup_lr=0.1),
        {"optim.weight_decay": 0.0, "optim.weight_decay_end": 0.0},
    ).optim
    tx, _ = make_optimizer(optim, batch_size=16, steps_per_epoch=6, total_steps=10**6, groups=groups)
    state, zeros = tx.init(params), jax.tree.map(jnp.zeros_like, params)
    ones = jax.tree.map(jnp.ones_like, params)
    for step in range(3):
        updates, state = tx.update(ones if step else zeros, state, params)
        if step == 0:
            assert updates["model"]["c"]["kernel"][0, 0] == pytest.approx(-0.1 * 0.5)
        frozen = updates["model"]["a"]["kernel"][0, 0]
        assert (frozen == 0.0) if step < 2 else frozen == pytest.approx(-0.1, rel=1e-3)
        assert not updates["model"]["b"]["kernel"].any()


@dataclasses.dataclass(frozen=True)
class DroppingKeys(NamedGroup):
    rate: float = key(0.5, "share of features dropped", least=0, most=1)


class Dropping(ImageMethod):
    """An encoder of the user's own, with dropout before its output."""

    Keys = DroppingKeys

    def init(self, key, sample):
        rngs = nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1))
        return Holder(self.encoder(sample, rngs), nnx.Dropout(self.config.rate, rngs=rngs))

    def loss(self, model, target, batch, key, step):
        features = model.encoder(self.whole(batch["image"]), train=True)
        dropped = model.dropout(features)
        return Output(jnp.mean(jnp.square(dropped)), {"kept": jnp.mean(dropped != 0)}, features)


class Holder(nnx.Module):
    def __init__(self, encoder, dropout):
        self.encoder, self.dropout = encoder, dropout


def test_dropout_draws_anew_each_step_and_is_no_part_of_the_state():
    name = f"{__name__}:Dropping"
    program = build_program(tiny_config(method__name=name, optim__lr=0.0, optim__warmup_lr=0.0))
    state = program.factory.create(0, BATCH)
    assert not any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state))
    losses, kept = [], []
    for _ in range(3):
        state, metrics = program.train_step(state, BATCH)
        losses.append(float(metrics["loss"]))
        kept.append(float(metrics["kept"]))
    assert len(set(losses)) == 3 and 0 < np.mean(kept) < 0.7
    statistics = make_statistics_step(program.method, program.factory, program.mesh)
    new = statistics(state.params["model"], state.stats, BATCH)
    assert "dropout" not in new
    calibrated = with_variables(state.stats, new)
    assert jax.tree.structure(calibrated) == jax.tree.structure(state.stats)


class MeanColour(nnx.Module):
    """An encoder of the user's own: the mean colour, scaled."""

    Keys = NamedGroup

    def __init__(self, channels):
        self.feature_dim = channels
        self.scale = nnx.Param(jnp.ones(channels))

    @classmethod
    def from_config(cls, config, sample, *, view_size, dtype, remat, rngs):
        return cls(sample.shape[-1])

    def __call__(self, images, *, train=False):
        return jnp.mean(images, axis=(1, 2)) * self.scale[...]


class MyVit(ViT):
    """A subclass keeps the keys of its parent, and masked methods take it."""

    @classmethod
    def from_config(cls, config, sample, **options):
        size = {"image_size": options.pop("view_size"), "patch_size": config.patch_size}
        return cls(16, 1, 2, **size, pool="mean", channels=sample.shape[-1], **options)


def test_a_subclass_of_our_encoder_serves_masked_methods():
    config = changed_config(tiny_masked_config("mae"), {"model.name": f"{__name__}:MyVit", "model.patch_size": 4})
    program = build_program(config)
    batch = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in BATCH.items()}
    _, metrics = jax.eval_shape(program.train_step, program.factory.abstract, batch)
    assert "loss" in metrics


class Stacked(ImageMethod):
    """Dropout in layers that are stacked, each with its own random stream."""

    Keys = DroppingKeys

    def init(self, key, sample):
        rngs = nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1))

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Dropout(self.config.rate, rngs=rngs)

        return Holder(self.encoder(sample, rngs), make(rngs))

    def loss(self, model, target, batch, key, step):
        features = model.encoder(self.whole(batch["image"]), train=True)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def apply(x, layer):
            return layer(x)

        return Output(jnp.mean(jnp.square(apply(features, model.dropout))), {}, features)


def test_dropout_in_stacked_layers_of_an_encoder_of_the_users_own():
    names = dict(method__name=f"{__name__}:Stacked", model__name=f"{__name__}:MeanColour")
    program = build_program(tiny_config(**names))
    state, metrics = program.train_step(program.factory.create(0, BATCH), BATCH)
    assert np.isfinite(metrics["loss"]) and state.params["probe"]["kernel"].shape == (3, 10)


@dataclasses.dataclass(frozen=True)
class SpreadKeys(Group):
    spread_weight: float = key(2.0, "weight of the spread", least=0)


def spread_loss(z, *, key, roles, spread_weight):
    """A loss of the user's own: views agree, and images differ."""
    agreement, spread = jnp.mean(jnp.var(z, axis=0)), jnp.mean(jnp.std(z, axis=1))
    return agreement - spread_weight * spread, {"agreement": agreement, "spread": spread}


spread_loss.Keys = SpreadKeys


def test_image_jepa_takes_a_loss_of_the_users_own():
    program = build_program(tiny_config(method__loss=f"{__name__}:spread_loss", method__spread_weight=3.0))
    batch = {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in BATCH.items()}
    _, metrics = jax.eval_shape(program.train_step, program.factory.abstract, batch)
    assert {"agreement", "spread"} <= set(metrics.names)
    with pytest.raises(UserError, match="config.method.loss.*has no .*nothing.*choose from vicreg"):
        tiny_config(method__loss=f"{__name__}:nothing")
