"""The transposed convolution and the U-Net that is built on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.models.rngs import init_rngs
from jepa_jax.projects.wildfire.models.unet import Enlarge, UNet
from tests.arrays import create, normal


def test_enlarging_is_the_transposed_convolution_of_four_pixels_and_stride_two():
    enlarge = create(lambda: Enlarge(3, 5, dtype=jnp.float32, rngs=init_rngs(0)))
    x = jnp.asarray(normal(0, (2, 4, 6, 3)))
    flipped = enlarge.kernel[...][::-1, ::-1]  # a transposed convolution scatters its kernel
    expected = jax.lax.conv_general_dilated(
        x, flipped, (1, 1), ((2, 2), (2, 2)), lhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert expected.shape == (2, 8, 12, 5)
    np.testing.assert_allclose(enlarge(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(8, 8), (7, 5)])
def test_features_have_the_size_of_their_map(size):
    unet = jax.jit(lambda x: UNet(3, (4, 6, 8), rngs=init_rngs(0))(x))
    x = normal(0, (2, *size, 3))
    y = unet(x)
    assert y.shape == (2, *size, 4)
    corner = np.zeros_like(x)
    corner[:, 0, 0] = 10
    far = unet(x + corner)[:, -1, -1]
    assert not np.allclose(far, y[:, -1, -1])  # the coarsest scale sees all of it
