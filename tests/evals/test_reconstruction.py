"""Reconstruction errors of a masked autoencoder beside the simplest guess."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from profiling.check_reconstruction import reconstruction_errors
from tests.stepping import IMAGES, build_program, model_of
from tests.tiny import tiny_masked_config


def test_flat_images_are_guessed_from_what_is_visible_and_others_are_not():
    program = build_program(tiny_masked_config("mae"))
    graph, variables = nnx.split(model_of(program))

    @jax.jit
    def measure(variables, images):
        model = nnx.merge(graph, variables)
        return reconstruction_errors(program.method, model, {"image": images}, jax.random.key(0))

    errors = [measure(variables, jnp.asarray(images)) for images in (np.full_like(IMAGES, 77), IMAGES)]
    assert errors[0][1] < 1e-10 and errors[0][0] > 0.01  # an untrained decoder paints something else
    # Noise around the mean of an image: the guess is as wrong as the pixels vary.
    pixels = program.method.whole(jnp.asarray(IMAGES), 16)
    variance = jnp.mean(jnp.var(pixels.reshape(len(pixels), -1, 3), axis=1))
    assert errors[1][1] == pytest.approx(float(variance), rel=0.1)
