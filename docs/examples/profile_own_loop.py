"""Profiles a training loop that knows nothing of jepa_jax: `python profile_own_loop.py [FOLDER]`.

Prints where the time of the last epoch went and what slows it down. The folder gets profile.html, profile.json and a
trace of three steps for TensorBoard.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jepa_jax

BATCH, FEATURES, CLASSES = 64, 256, 10
optimizer = optax.adamw(1e-3)


def loss_of(params, x, y):
    with jax.named_scope("encoder"):  # appears in the profile, forward and backward
        hidden = jax.nn.relu(x @ params["encoder"])
    with jax.named_scope("head"):
        logits = hidden @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def train_step(state, batch):
    params, moments = state
    loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
    with jax.named_scope("optimizer"):
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
    return (params, moments), loss


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        time.sleep(0.002)  # a slow loader: the profile says so
        yield rng.standard_normal((BATCH, FEATURES), np.float32), rng.integers(0, CLASSES, BATCH)


def main(folder):
    params = {"encoder": jnp.ones((FEATURES, 512)) * 0.01, "head": jnp.zeros((512, CLASSES))}
    state = params, optimizer.init(params)
    options = {"batch_size": BATCH, "steps_per_epoch": 40, "trace_steps": "50:52"}
    with jepa_jax.profile_loop(train_step, folder, **options) as profiler:
        for number, batch in enumerate(profiler.batches(batches(120)), start=1):
            state, loss = profiler.step(state, batch)
            if number % 40 == 0:
                with profiler.section("logging"):
                    print(f"step {number}: loss {float(loss):.3f}")
    print(profiler.summary())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "profiles/own_loop")
