"""Whitening filters, and the encoders that read images through them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.models.patchnet import PatchNet
from jepa_jax.models.pooling import pooled
from jepa_jax.models.tokens import patchify
from jepa_jax.models.vit import ViT
from jepa_jax.models.whitening import WhitenedPatches, whitening_filters
from jepa_jax.program.config import load_config
from tests.arrays import create, normal

IMAGES = jnp.asarray(normal(0, (64, 16, 16, 3)))


def whitened_patches(images=IMAGES, **options):
    return create(lambda: WhitenedPatches(images, **options, dtype=jnp.float32))


def small_vit(whitened):
    patches = WhitenedPatches(IMAGES, patch_size=8, filter_size=5, filters=8, dtype=jnp.float32) if whitened else None
    return ViT(16, 1, 2, image_size=16, patch_size=8, whitened=patches, rngs=nnx.Rngs(0))


def call(module, *arrays):
    return nnx.jit(lambda module, *arrays: module(*arrays))(module, *arrays)


def test_whitening_filters_decorrelate_patches():
    # Smooth images: neighbouring pixels are strongly correlated.
    noise = np.random.default_rng(0).normal(size=(512, 16, 16, 3))
    images = (np.cumsum(np.cumsum(noise, 1), 2) / 10).astype(np.float32)
    images = images - images.mean()
    filters = np.asarray(jax.jit(whitening_filters, static_argnums=(1, 2))(images, 4, 6))
    patches = images[:, :4, :4].reshape(512, -1)
    centred = patches - patches.mean(0)
    before = np.corrcoef(centred, rowvar=False)
    responses = np.cov(np.concatenate([
        images[:, y : y + 4, x : x + 4].reshape(512, -1) @ filters.reshape(-1, 6)
        for y in (0, 3, 6, 9, 12) for x in (0, 3, 6, 9, 12)
    ]), rowvar=False)  # fmt: skip
    off_diagonal = responses - np.diag(np.diag(responses))
    assert np.abs(before).mean() > 0.2
    assert np.abs(off_diagonal).max() < 0.02 * np.diag(responses).max()


def test_a_whitened_patch_is_its_rectified_filters_averaged_over_quadrants():
    whitened = whitened_patches(patch_size=4, filter_size=3, filters=5)
    patch = np.asarray(IMAGES[0, :4, :4])
    filters = np.asarray(whitened.filters[...])
    windows = np.stack([[patch[y : y + 3, x : x + 3] for x in (0, 1)] for y in (0, 1)])  # [2, 2, 3, 3, C]
    responses = np.einsum("yxhwc,hwcf->yxf", windows, filters)  # a quadrant has one place
    rectified = np.concatenate([np.maximum(responses, 0), np.maximum(-responses, 0)], axis=-1).reshape(-1)
    expected = (rectified - whitened.mean[...]) * whitened.scale[...]
    np.testing.assert_allclose(call(whitened, patch.reshape(1, 1, -1))[0, 0], expected, rtol=1e-4, atol=1e-5)


def test_whitened_patches_of_the_sample_have_mean_zero_and_variance_one():
    whitened = whitened_patches(patch_size=8, filter_size=5, filters=8)
    numbers = np.asarray(call(whitened, patchify(IMAGES, 8)))
    np.testing.assert_allclose(numbers.mean((0, 1)), 0, atol=1e-4)
    np.testing.assert_allclose(numbers.std((0, 1)), 1, rtol=1e-3)


def test_a_sample_need_not_consist_of_whole_patches():
    whitened = whitened_patches(patch_size=6, filter_size=3, filters=4)
    assert np.isfinite(call(whitened, patchify(IMAGES[:, :12, :12], 6))).all()


def test_a_whitened_patch_reads_no_pixel_of_another():
    vit = create(lambda: small_vit(whitened=True))
    changed = np.array(IMAGES[:1])
    changed[:, :8, :8] += 1
    embed = nnx.jit(lambda vit, images: vit.embed(images))
    differs = np.abs(embed(vit, changed) - np.asarray(embed(vit, IMAGES[:1]))).max(axis=(0, 2)) > 1e-6
    assert differs.tolist() == [True, False, False, False]


@pytest.mark.parametrize("kind", ["linear", "whitened"])
def test_tokens_of_described_patches_are_those_of_the_images(kind):
    vit = create(lambda: small_vit(whitened=kind == "whitened"))

    @nnx.jit
    def read(vit, images, keep):
        described = vit.describe(images)
        embedded = vit.embed(images), vit.embed(images, described=described)
        kept = vit.embed(images, keep), vit.embed(images, keep, described)
        return described, vit.describe(images, keep), embedded, kept

    described, described_alone, embedded, kept = read(vit, IMAGES[:2], np.array([[3, 0], [1, 2]]))
    assert described.shape == (2, 4, 2 * 8 * 4 if kind == "whitened" else 8 * 8 * 3)
    np.testing.assert_allclose(*embedded, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(*kept, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(described_alone[1, 0], described[1, 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.filter_size": 8}, r"model.filter_size = 8.*model.patch_size = 8"),
        ({"model.filter_size": 3, "model.filters": 28}, r"model.filters = 28.*27 principal directions"),
    ],
)
def test_filters_that_do_not_fit_their_patches_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config("ijepa_cifar10", {"model.patch_size": 8, "model.embedding": "whitened", **overrides})


def test_patchnet_gives_its_last_layer_or_all_of_them_side_by_side():
    def features(all_layers: bool) -> jax.Array:
        options = dict(patch_size=4, stride=2, stem_width=8, widths=(6, 10), all_layers=all_layers)
        net = create(lambda: PatchNet(IMAGES, **options, rngs=nnx.Rngs(0)))
        assert net.feature_dim == (16 if all_layers else 10)
        return nnx.jit(lambda net, x: pooled(net.outputs(x), "grid2"))(net, IMAGES[:4]).reshape(4, 4, -1)

    np.testing.assert_allclose(features(all_layers=True)[:, :, 6:], features(all_layers=False), rtol=1e-5)
