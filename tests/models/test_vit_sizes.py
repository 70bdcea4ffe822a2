"""A ViT on images of other sizes than it was built for: its positions cover the same area."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.models.positions import interpolated, sincos_positions
from jepa_jax.models.vit import BlockOptions, ViT, VitConfig
from tests.arrays import create, normal


def ramp(grid):
    """Positions that are their own row and column, [1, grid^2, 2]."""
    return np.stack(np.divmod(np.arange(grid**2), grid), axis=-1).astype(np.float32)[None]


def test_positions_of_the_same_size_are_the_same():
    positions = jnp.asarray(normal(0, (1, 49, 8)))
    assert interpolated(positions, 7, 7) is positions
    np.testing.assert_array_equal(sincos_positions(7, 8, (7, 7)), sincos_positions(7, 8))


@pytest.mark.parametrize("old, new", [(7, 14), (7, 16), (16, 7), (6, 18)])
def test_learned_positions_that_are_coordinates_stay_coordinates(old, new):
    square = np.asarray(jax.jit(interpolated, static_argnums=(1, 2))(ramp(old), new, new)).reshape(new, new, 2)
    expected = (np.arange(new) + 0.5) * old / new - 0.5  # the centres of the new patches, in old ones
    reach = 2 * max(1.0, old / new)  # of the cubic kernel; beyond it the edge cuts it off
    inside = (expected >= reach - 0.5) & (expected <= old - 0.5 - reach)
    assert inside.sum() >= 2
    np.testing.assert_allclose(square[inside, 0, 0], expected[inside], atol=1e-3)
    np.testing.assert_allclose(square[0, inside, 1], expected[inside], atol=1e-3)
    assert square.min() > -0.5 and square.max() < old - 0.5


def test_three_times_as_many_fixed_positions_contain_the_old_ones():
    finer = sincos_positions(4, 16, (12, 12)).reshape(12, 12, 16)
    np.testing.assert_allclose(finer[1::3, 1::3].reshape(16, 16), sincos_positions(4, 16), atol=1e-6)
    wider = sincos_positions(4, 16, (4, 12)).reshape(4, 12, 16)
    np.testing.assert_allclose(wider, finer[1::3], atol=1e-6)


@pytest.mark.parametrize("positions", ["learned", "sincos"])
@pytest.mark.parametrize("pool, cls_token", [("cls", True), ("mean", False)])
def test_an_encoder_reads_images_of_any_size_and_shape(positions, pool, cls_token):
    options = dict(pool=pool, cls_token=cls_token, positions=positions)
    encoder = create(lambda: ViT(16, 1, 2, image_size=16, patch_size=4, rngs=nnx.Rngs(0), **options))

    @nnx.jit
    def read(encoder, image, smaller, keep):
        return encoder(image), encoder(smaller), encoder.embed(image), encoder.embed(image, keep)

    large, small, every, kept = read(
        encoder, normal(1, (2, 32, 32, 3)), normal(2, (2, 12, 20, 3)), np.array([[0, 5, 63]] * 2)
    )
    assert large.shape == small.shape == (2, 16)
    np.testing.assert_allclose(kept, every[:, [0, 5, 63]], rtol=1e-5, atol=1e-6)


def test_rotary_positions_of_kept_patches_are_their_own():
    """With registers and SwiGLU: all patches in another order have the same outputs in that order."""
    options = BlockOptions(mlp="swiglu", mlp_width=24)
    encoder = create(
        lambda: ViT(16, 2, 2, image_size=16, patch_size=4, positions="rotary", registers=3, options=options,
                    rngs=nnx.Rngs(0))
    )  # fmt: skip
    order = np.random.default_rng(0).permutation(16)

    @nnx.jit
    def read(encoder, image):
        keep = jnp.asarray(order)[None]
        part = encoder.encode(encoder.embed(image, keep), encoder.rotation(image, keep))
        swapped = encoder.tokens(jnp.swapaxes(image, 1, 2))
        return encoder.tokens(image), part, swapped, encoder.attention_maps(image)

    whole, part, swapped, maps = read(encoder, normal(1, (1, 16, 16, 3)))
    assert whole.shape == (1, 1 + 3 + 16, 16) and maps.shape == (1, 2, 4, 4)
    np.testing.assert_allclose(part[:, 4:], whole[:, 4:][:, order], atol=1e-5)
    np.testing.assert_allclose(part[:, :4], whole[:, :4], atol=1e-5)
    assert np.abs(swapped[:, 4:] - whole[:, 4:]).max() > 1e-3  # places are seen


def test_pixels_that_no_patch_covers_are_refused():
    def read():
        return ViT(16, 1, 2, image_size=16, patch_size=4, rngs=nnx.Rngs(0))(jnp.zeros((1, 16, 18, 3)))

    with pytest.raises(ValueError, match="images of 16 x 18 pixels: patch_size = 4 does not divide them"):
        jax.eval_shape(read)


def test_the_default_pool_is_that_of_the_config():
    assert nnx.eval_shape(lambda: ViT(16, 1, 2, image_size=16, patch_size=4, rngs=nnx.Rngs(0))).pool == VitConfig().pool
