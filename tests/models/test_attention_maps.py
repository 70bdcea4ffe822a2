"""What a ViT attends to, against softmax attention written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import softmax

from jepa_jax.models.vit import ViT

IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 6, 3)), jnp.float32)


@pytest.mark.parametrize("cls_token", [True, False])
def test_maps_are_softmax_attention_of_the_last_block(cls_token):
    vit = ViT(8, 2, 2, image_size=6, patch_size=2, cls_token=cls_token, pool="mean", rngs=nnx.Rngs(0))
    graph, state = nnx.split(vit)
    rng = np.random.default_rng(1)
    state = jax.tree.map(lambda leaf: leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype), state)
    vit = nnx.merge(graph, state)
    tokens = np.asarray(vit.embed(IMAGES))
    if cls_token:
        first = np.asarray(vit.cls_token[...] + vit.position[:, :1])
        tokens = np.concatenate([np.repeat(first, 3, axis=0), tokens], axis=1)
    last = vit.blocks[1]
    x = np.asarray(vit.blocks[0](jnp.asarray(tokens)), np.float64)
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    x = x * last.norm1.scale[...] + last.norm1.bias[...]
    q, k, _ = np.split(x @ last.attention.qkv.kernel[...] + last.attention.qkv.bias[...], 3, axis=-1)
    maps = np.asarray(jax.jit(ViT.attention_maps)(vit, IMAGES))
    assert maps.shape == (3, 2, 3, 3)
    for head in range(2):
        part = slice(4 * head, 4 * head + 4)  # 8 numbers, 2 heads
        weights = softmax(q[..., part] @ np.swapaxes(k[..., part], 1, 2) / np.sqrt(4), axis=-1)  # [3, n, n]
        expected = weights[:, 0, 1:] if cls_token else weights.mean(axis=1)
        np.testing.assert_allclose(maps[:, head].reshape(3, 9), expected, rtol=1e-4, atol=1e-6)
    assert np.ptp(maps) > 0.05  # not the uniform attention of an untrained model
    sums = maps.sum(axis=(2, 3))
    assert (sums < 1).all() if cls_token else np.allclose(sums, 1, rtol=1e-5)
