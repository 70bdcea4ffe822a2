"""Video JEPA: what the two ways of unrolling compare, what weights switch off, and how maps are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.models.rngs import init_rngs
from jepa_jax.projects.world_models.methods.video_jepa import VideoJepa
from jepa_jax.projects.world_models.networks.maps import Doubled, LatentUNet
from tests.arrays import create
from tests.projects.world_models.tiny import video_config

RAMP = jnp.broadcast_to(jnp.arange(5.0)[None, :, None, None, None], (2, 5, 1, 1, 3))  # frame t has latent t


class Copies:
    """A model that predicts the last latent."""

    def following(self, z, *, train):
        return z[:, 1:]

    def rollout(self, z, steps, *, train):
        return jnp.repeat(z[:, -1:], steps, axis=1)

    def projected(self, z, *, train):
        return z


@pytest.mark.parametrize(
    "unroll, steps, error",
    [
        ("parallel", 1, 1.0),  # one step behind everywhere
        ("parallel", 2, (1 + (1 + 4 + 4) / 3) / 2),  # the first prediction always has true context
        ("parallel", 3, (1 + 3 + (1 + 4 + 9) / 3) / 3),
        ("autoregressive", 1, 1.0),
        ("autoregressive", 3, (1 + 4 + 9) / 3),
    ],
)
def test_each_iteration_is_one_step_further_ahead(unroll, steps, error):
    method = VideoJepa(video_config("video_jepa", method__unroll=unroll, method__steps=steps), 1)
    assert float(method._prediction_error(Copies(), RAMP, RAMP)) == pytest.approx(error)


def test_a_weight_of_0_removes_its_term():
    weights = dict(method__loss__variance=0.0, method__loss__sigreg=0.1, method__loss__similarity=1.0)
    method = VideoJepa(video_config("video_jepa", **weights, method__projector=()), 1)
    frames = np.random.default_rng(0).integers(0, 256, (4, 6, 16, 16, 1), np.uint8)

    def loss(key):
        return method.loss(method.init(key, {"frames": frames}), None, {"frames": frames}, key, jnp.int32(0))

    terms = jax.eval_shape(loss, jax.random.key(0)).terms
    assert set(terms) == {"prediction", "covariance", "similarity", "sigreg"}
    with pytest.raises(UserError, match="nothing keeps latents from collapsing"):
        video_config("video_jepa", method__loss__variance=0.0)


def test_a_rollout_predicts_from_its_own_predictions():
    method = VideoJepa(video_config("video_jepa"), 1)
    frames = np.random.default_rng(0).integers(0, 256, (2, 6, 16, 16, 1), np.uint8)
    model = create(lambda: method.init(jax.random.key(0), {"frames": frames}))

    @nnx.jit
    def made(model):
        z = model.encode(frames)
        rolled = model.rollout(z[:, :2], 2)
        first = model.following(z[:, :2])
        return rolled, first, model.following(jnp.concatenate([z[:, 1:2], first], axis=1))

    rolled, first, second = made(model)
    assert rolled.shape == (2, 2, 8, 8, 6)
    np.testing.assert_allclose(rolled, jnp.concatenate([first, second], axis=1), rtol=1e-5, atol=1e-6)


def test_the_u_net_keeps_the_size_of_maps():
    def outputs(maps, small):
        rngs = init_rngs(0)
        unet = LatentUNet(6, (8, 12, 16), dtype=jnp.float32, rngs=rngs)
        return unet(maps, maps), Doubled(4, 3, dtype=jnp.float32, rngs=rngs)(small, False)

    maps, small = jax.ShapeDtypeStruct((2, 8, 8, 6), jnp.float32), jax.ShapeDtypeStruct((2, 4, 4, 4), jnp.float32)
    assert [out.shape for out in jax.eval_shape(outputs, maps, small)] == [(2, 8, 8, 6), (2, 8, 8, 3)]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"method__strides": (2,)}, "method.strides.*one number for each of method.widths"),
        ({"data__image_size": 18}, "data.image_size.*use a multiple of 4"),
        ({"method__steps": 5}, "method.steps.*needs 2 frames more"),
        ({"eval__pool": "cls"}, "eval.pool.*has no CLS token"),
    ],
)
def test_what_does_not_fit_together_is_named(change, message):
    with pytest.raises(UserError, match=message):
        video_config("video_jepa", **change)
