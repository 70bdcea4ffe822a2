"""A ViT on images of other sizes than it was built for: its positions cover the same area."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.models.vit import ViT, interpolated, sincos_positions


def ramp(grid):
    """Positions that are their own row and column, [1, grid^2, 2]."""
    return jnp.asarray(np.stack(np.divmod(np.arange(grid**2), grid), axis=-1), jnp.float32)[None]


def test_positions_of_the_same_size_are_the_same():
    positions = jax.random.normal(jax.random.key(0), (1, 49, 8))
    assert interpolated(positions, 7) is positions
    np.testing.assert_array_equal(sincos_positions(7, 8, 7), sincos_positions(7, 8))


@pytest.mark.parametrize("old, new", [(7, 14), (7, 16), (16, 7), (6, 18)])
def test_learned_positions_that_are_coordinates_stay_coordinates(old, new):
    square = np.asarray(interpolated(ramp(old), new)).reshape(new, new, 2)
    expected = (np.arange(new) + 0.5) * old / new - 0.5  # the centres of the new patches, in old ones
    reach = 2 * max(1.0, old / new)  # of the cubic kernel; beyond it the edge cuts it off
    inside = (expected >= reach - 0.5) & (expected <= old - 0.5 - reach)
    assert inside.sum() >= 2
    np.testing.assert_allclose(square[inside, 0, 0], expected[inside], atol=1e-3)
    np.testing.assert_allclose(square[0, inside, 1], expected[inside], atol=1e-3)
    assert square.min() > -0.5 and square.max() < old - 0.5


def test_three_times_as_many_fixed_positions_contain_the_old_ones():
    finer = sincos_positions(4, 16, 12).reshape(12, 12, 16)
    np.testing.assert_allclose(finer[1::3, 1::3].reshape(16, 16), sincos_positions(4, 16), atol=1e-6)


@pytest.mark.parametrize("positions", ["learned", "sincos"])
@pytest.mark.parametrize("pool, cls_token", [("cls", True), ("mean", False)])
def test_an_encoder_reads_images_of_any_size(positions, pool, cls_token):
    options = dict(pool=pool, cls_token=cls_token, positions=positions)
    encoder = nnx.jit(lambda: ViT(16, 1, 2, image_size=16, patch_size=4, rngs=nnx.Rngs(0), **options))()
    image = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    smaller = jax.image.resize(image, (2, 12, 12, 3), "linear")
    large, small = encoder(image), encoder(smaller)
    assert large.shape == small.shape == (2, 16)
    keep = jnp.array([[0, 5, 63]] * 2)
    np.testing.assert_allclose(encoder.embed(image, keep), encoder.embed(image)[:, [0, 5, 63]], rtol=1e-5)
