"""The operation counter: closed forms, and XLA's own analysis of whole models."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from jepa_jax.compiled.flops import Rules, count_flops
from jepa_jax.models.kernels.conv import conv2d
from jepa_jax.models.resnet import ResNet
from jepa_jax.models.vit import ViT

CPU_AS_XLA = Rules(platform="cpu", loops_once=True, elementwise=True)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def xla_flops(function, *args):
    return jax.jit(function).lower(*args).cost_analysis()["flops"]


def test_a_product_takes_two_operations_a_multiply_add():
    assert count_flops(jnp.matmul, shape(3, 5), shape(5, 7)) == 2 * 3 * 5 * 7
    assert count_flops(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), shape(4, 3, 5), shape(4, 5, 7)) == 8 * 3 * 5 * 7


def test_loops_count_as_often_as_they_run():
    def loop(x):
        return lax.scan(lambda carry, _: (carry @ x, None), x, length=11)[0]

    assert count_flops(loop, shape(4, 4)) == 11 * 2 * 4**3
    assert count_flops(loop, shape(4, 4), rules=Rules(loops_once=True)) == 2 * 4**3


def test_of_a_branch_the_dearest_counts_and_of_a_platform_its_own():
    def branches(x):
        return lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x + 1, x)

    def platforms(x):
        return lax.platform_dependent(x, cpu=lambda x: x @ x @ x, default=lambda x: x @ x)

    assert count_flops(branches, shape(4, 4)) == 2 * 4**3
    counts = [count_flops(platforms, shape(4, 4), rules=Rules(platform=name)) for name in ("cpu", "cuda", None)]
    assert counts == [4 * 4**3, 2 * 4**3, 4 * 4**3]


def test_what_nothing_depends_on_is_not_counted():
    def gradient_alone(x, y):
        return jax.vjp(jnp.matmul, x, y)[1](jnp.ones((3, 7)))[0]  # the product itself is thrown away

    assert count_flops(gradient_alone, shape(3, 5), shape(5, 7)) == 2 * 3 * 5 * 7


def test_a_kernel_counts_as_often_as_its_grid_has_cells():
    from jax.experimental import pallas as pl

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] @ x_ref[...]

    block = pl.BlockSpec((8, 8), lambda i: (i, 0))
    call = pl.pallas_call(kernel, grid=(4,), in_specs=[block], out_specs=block, out_shape=shape(32, 8))
    assert count_flops(call, shape(32, 8)) == 4 * 2 * 8**3


@pytest.mark.parametrize("stride, groups", [(1, 1), (2, 1), (1, 8)])
def test_convolutions_and_their_gradients_agree_with_xla(stride, groups):
    layout = ("NHWC", "HWIO", "NHWC")

    def loss(x, kernel):
        strides = (stride, stride)
        out = lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=layout, feature_group_count=groups)
        return jnp.sum(out)

    args = shape(2, 9, 9, 16), shape(3, 3, 16 // groups, 8)
    ours = count_flops(jax.grad(loss, (0, 1)), *args, rules=CPU_AS_XLA)
    assert ours == pytest.approx(xla_flops(jax.grad(loss, (0, 1)), *args), rel=0.01)


def test_our_convolution_counts_as_a_plain_one_on_gpus():
    def ours(x, kernel):
        return conv2d(x, kernel, padding=1)

    def plain(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), [(1, 1)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    args = shape(2, 8, 8, 64), shape(3, 3, 64, 64)
    assert count_flops(ours, *args, rules=Rules(platform="cuda")) == count_flops(plain, *args)


def gradient(model, images):
    structure, variables = nnx.split(model)
    return jax.grad(lambda v: jnp.sum(nnx.merge(structure, v)(images, train=True))), variables


def test_a_resnet_agrees_with_xla():
    model = nnx.eval_shape(lambda: ResNet((1, 1, 1, 1), bottleneck=False, stem="cifar", rngs=nnx.Rngs(0)))
    function, variables = gradient(model, jnp.zeros((16, 32, 32, 3)))
    variables = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), variables)
    assert count_flops(function, variables, rules=CPU_AS_XLA) == pytest.approx(xla_flops(function, variables), rel=0.03)


def test_a_vit_agrees_with_xla():
    model = nnx.eval_shape(lambda: ViT(192, 2, 3, image_size=64, patch_size=8, rngs=nnx.Rngs(0)))
    function, variables = gradient(model, jnp.zeros((4, 64, 64, 3)))
    assert count_flops(function, variables, rules=CPU_AS_XLA) == pytest.approx(xla_flops(function, variables), rel=0.03)


def test_the_products_of_a_resnet_are_known_in_closed_form():
    """0.556 GMAC a view and pass, three passes; what meets padding does not count, and that is a seventh."""
    model = nnx.eval_shape(lambda: ResNet((2, 2, 2, 2), bottleneck=False, stem="cifar", rngs=nnx.Rngs(0)))
    function, variables = gradient(model, jnp.zeros((1, 32, 32, 3)))
    counted = count_flops(function, variables, rules=Rules(platform="cuda"))
    assert 6 / 7 * 0.99 < counted / (3 * 2 * 0.556e9) < 6 / 7 * 1.02


def test_published_macs_count_products_with_padding():
    kernel = shape(3, 3, 5, 7)  # on 4 x 4 positions nine taps each; without padding 10 x 10 pairs meet
    conv = functools.partial(conv2d, padding=1)
    on_gpu = Rules(platform="cuda")
    assert count_flops(conv, shape(2, 4, 4, 5), kernel, rules=on_gpu) == 2 * 2 * 5 * 7 * 10 * 10
    padded = dataclasses.replace(on_gpu, padding=True)
    assert count_flops(conv, shape(2, 4, 4, 5), kernel, rules=padded) == 2 * 2 * 5 * 7 * 16 * 9
