"""Forward mode: tangents of encoders agree with their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.models.kernels import forward_mode
from jepa_jax.models.resnet import ResNet
from jepa_jax.models.vit import ViT
from tests.arrays import create, normal

ENCODERS = {
    "vit": lambda: ViT(16, 1, 2, image_size=8, patch_size=4, rngs=nnx.Rngs(0)),
    "resnet": lambda: ResNet((1,), bottleneck=False, stem="imagenet", width=4, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_tangents_agree_with_gradients(name):
    graph, state = nnx.split(create(ENCODERS[name]))
    images, direction = normal(1, (2, 8, 8, 3)), normal(2, (2, 8, 8, 3))
    weights = normal(3, (2, nnx.merge(graph, state).feature_dim))

    def score(images):
        return jnp.sum(weights * nnx.merge(graph, state)(images))

    @jax.jit
    def slopes(images, direction):
        with forward_mode():
            _, tangent = jax.jvp(score, (images,), (direction,))
        return tangent, jnp.sum(jax.grad(score)(images) * direction)

    np.testing.assert_allclose(*slopes(images, direction), rtol=1e-4, atol=1e-5)
