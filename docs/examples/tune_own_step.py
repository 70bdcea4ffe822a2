"""Finds the fastest settings of a training step that knows nothing of jepa_jax: `python tune_own_step.py`."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jepa_jax

SIZES = (256, 512, 10)


def make(batch: int, precision: str, workers: int):
    """Returns a step and its batches; `workers` would go to the loader of a real program."""
    optimizer = optax.adamw(1e-3)
    keys = jax.random.split(jax.random.key(0), len(SIZES) - 1)
    shapes = itertools.pairwise(SIZES)
    params = [jax.random.normal(key, shape) * 0.05 for key, shape in zip(keys, shapes, strict=True)]
    state = params, optimizer.init(params)

    def loss_of(params, images, labels):
        x = images
        for kernel in params[:-1]:
            x = jax.nn.relu(x @ kernel.astype(precision))
        logits = (x @ params[-1].astype(precision)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def train_step(state, images, labels):
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, images.astype(precision), labels)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    def step(element):
        nonlocal state
        state, loss = train_step(state, *element)
        return loss

    return step, batches(batch)


def batches(size: int):
    rng = np.random.default_rng(0)
    while True:
        yield rng.standard_normal((size, SIZES[0]), np.float32), rng.integers(0, SIZES[-1], size)


if __name__ == "__main__":
    result = jepa_jax.tune_step(make, batch=64, precisions=("float32", "bfloat16"), budget="2m")
    print("use make(**", result["chosen"], ")")
