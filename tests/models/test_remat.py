"""Policies of recomputation: the same gradients, and light ones that keep products and statistics alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.compiled.flops import count_flops
from jepa_jax.models.remat import noted_remat
from jepa_jax.models.resnet import ResNet
from jepa_jax.models.vit import ViT
from tests.arrays import create, normal

RESNET = {"bottleneck": False, "stem": "cifar", "width": 4}
BUILDERS = {
    "resnet": lambda remat: ResNet((1, 1), remat=remat, rngs=nnx.Rngs(0), **RESNET),
    "vit": lambda remat: ViT(16, 1, 2, image_size=8, patch_size=4, remat=remat, rngs=nnx.Rngs(0)),
}


def gradient(build, remat):
    """Returns the gradient of a sum of squared features as a function of parameters and images, and both."""
    graph, params, rest = nnx.split(create(lambda: build(remat)), nnx.Param, ...)

    def loss(params, images):
        return jnp.sum(nnx.merge(graph, params, rest, copy=True)(images, train=True) ** 2)

    return jax.grad(loss), params, normal(1, (4, 8, 8, 3))


@pytest.mark.parametrize("name", BUILDERS)
def test_every_policy_gives_the_same_gradients(name):
    made = []
    for remat in ("none", "light", "full"):
        function, *args = gradient(BUILDERS[name], remat)
        made.append(jax.tree.leaves(jax.jit(function)(*args)))
    for other in made[1:]:
        for mine, theirs in zip(made[0], other, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BUILDERS)
def test_light_computes_few_products_again_and_full_all_of_the_forward_pass(name):
    flops = {}
    for remat in ("none", "light", "full"):
        function, *args = gradient(BUILDERS[name], remat)
        flops[remat] = count_flops(function, *args)
    assert flops["none"] <= flops["light"] < 1.1 * flops["none"] < 1.15 * flops["none"] < flops["full"]


def test_what_is_recomputed_is_noted():
    def noted(remat):
        with noted_remat([]) as found:
            jax.eval_shape(lambda: BUILDERS["vit"](remat)(jnp.zeros((1, 16, 16, 3))))
        return found

    assert noted("full") == ["full"] and noted("none") == []
