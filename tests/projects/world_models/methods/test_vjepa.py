"""V-JEPA: tubelets and their places, masks over all frames, and what the context encoder can see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.projects.world_models.methods.vjepa import VJepa
from jepa_jax.projects.world_models.networks.tubelets import tubelet_positions, tubelets
from tests.projects.world_models.tiny import video_config


def test_a_tubelet_holds_its_pixels_of_its_frames():
    video = np.arange(4 * 4 * 6 * 2, dtype=np.float32).reshape(1, 4, 4, 6, 2)
    found = np.asarray(tubelets(jnp.asarray(video), 2, 2))
    assert found.shape == (1, 2 * 2 * 3, 16)
    expected = video[0, 2:4, 2:4, 4:6]  # the last tubelet: of the last times, rows and columns
    assert sorted(found[0, -1]) == sorted(expected.ravel())
    assert sorted(found[0, 1]) == sorted(video[0, 0:2, 0:2, 2:4].ravel())


@pytest.mark.parametrize("width", [8, 24, 48, 64, 1024])
def test_every_place_has_a_position_of_its_own(width):
    places = tubelet_positions(4, 3, width)
    assert places.shape == (36, width) and np.abs(places).max() <= 1
    distance = np.linalg.norm(places[:, None] - places, axis=-1) + np.eye(36)
    assert distance.min() > 1e-3


@pytest.fixture(scope="module")
def method():
    return VJepa(video_config("vjepa"), 10)


def test_masks_are_the_same_in_all_frames(method):
    assert (method.times, method.grid) == (2, 8)
    places = np.asarray(method.in_all_frames(jnp.array([[3, 10]])))
    np.testing.assert_array_equal(places, [[3, 10, 64 + 3, 64 + 10]])
    small, large = method.families
    assert large.target_tokens > small.target_tokens and large.context_tokens >= 4


def test_the_context_does_not_depend_on_what_is_hidden(method):
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (2, 6, 16, 16, 1), np.uint8)
    masks = jax.jit(lambda key: method.families[0].sample(key, 2))(jax.random.key(1))
    hidden = np.zeros((2, 64), bool)
    np.put_along_axis(hidden, np.asarray(masks.hidden), True, axis=1)
    cover = np.kron(hidden.reshape(2, 8, 8), np.ones((2, 2)))[:, None, :, :, None].astype(bool)
    other = np.where(cover, rng.integers(0, 256, frames.shape, np.uint8), frames)

    def contexts(key, *both):
        model = method.init(key, {"frames": frames})
        seen = method.in_all_frames(masks.context)
        return [model.encoder(method.normalised(one), seen) for one in both]

    one, two = jax.jit(contexts)(jax.random.key(0), frames, other)
    assert (other != frames).any()
    np.testing.assert_array_equal(one, two)


def test_the_loss_is_the_mean_of_both_families(method):
    frames = np.random.default_rng(0).integers(0, 256, (2, 6, 16, 16, 1), np.uint8)

    def loss(key):
        model = method.init(key, {"frames": frames})
        out = method.loss(model, model, {"frames": frames}, key, 0)
        return out.loss, out.terms, method.features(model, {"frames": frames})

    total, terms, features = jax.jit(loss)(jax.random.key(0))
    assert set(terms) == {"small_blocks", "large_blocks"} and features.shape == (2, 24)
    assert float(total) == pytest.approx((float(terms["small_blocks"]) + float(terms["large_blocks"])) / 2, rel=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model__name": "resnet18"}, "model.name.*takes the sizes of a ViT"),
        ({"method__tubelet_frames": 4}, "data.max_frames.*no multiple of method.tubelet_frames = 4"),
        ({"method__predictor_heads": 3}, "predictor_width.*multiple"),
    ],
)
def test_what_does_not_fit_together_is_named(change, message):
    with pytest.raises(UserError, match=message):
        video_config("vjepa", **change)
