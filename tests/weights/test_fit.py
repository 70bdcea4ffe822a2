"""The first layer for another number of channels."""

import numpy as np
import pytest

from jepa_jax.weights.fit import adapt_channels

KERNEL = np.random.default_rng(0).standard_normal((3, 3, 3, 4))


@pytest.mark.parametrize("channels", [1, 2, 7])
def test_images_with_equal_channels_give_what_they_gave(channels):
    kernel, sentence = adapt_channels(KERNEL, channels)
    assert kernel.shape == (3, 3, channels, 4)
    np.testing.assert_allclose(kernel.sum(axis=2), KERNEL.sum(axis=2))
    np.testing.assert_allclose(kernel, np.broadcast_to(kernel[:, :, :1], kernel.shape))
    assert f"from 3 to {channels} channels" in sentence and f"times 3/{channels}" in sentence


def test_the_same_number_of_channels_changes_nothing():
    kernel, sentence = adapt_channels(KERNEL, 3)
    np.testing.assert_array_equal(kernel, KERNEL)
    assert "as it was saved" in sentence
