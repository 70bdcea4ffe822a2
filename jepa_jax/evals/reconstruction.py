"""How well a masked autoencoder paints hidden patches of images it never saw, against the simplest guess."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.evals.trained_encoder import TrainedEncoder
from jepa_jax.methods.mae import MaskedAutoencoder
from jepa_jax.methods.masking import random_split
from jepa_jax.models.tokens import take_tokens
from jepa_jax.models.vit import patchify


def reconstruction_errors(method: MaskedAutoencoder, model: Any, images: jax.Array, key: jax.Array) -> jax.Array:
    """[2]: mean squared error over hidden pixels of the model, and of each image's mean visible colour."""
    view = method.whole(images)
    visible, hidden = random_split(key, len(view), method.tokens, method.visible_tokens)
    patches = patchify(view, method.model.patch_size)
    wanted = take_tokens(patches, hidden)
    painted = method.reconstruct(model, view, visible, hidden)
    seen = take_tokens(patches, visible).reshape(len(view), -1, 3)
    guess = jnp.tile(jnp.mean(seen, axis=1), wanted.shape[-1] // 3)[:, None]  # one colour for all pixels
    return jnp.stack([jnp.mean(jnp.square(painted - wanted)), jnp.mean(jnp.square(guess - wanted))])


def held_out_reconstruction(encoder: TrainedEncoder) -> dict[str, float]:
    """The errors over the test split, in squared units of normalised pixels, and their ratio."""
    method = encoder.program.method
    if not isinstance(method, MaskedAutoencoder):
        raise UserError(f"config.method.name = {encoder.config.method.name!r}: reconstructs nothing; give a run of mae")
    size = encoder.config.eval.batch_size

    def errors(params, stats, images, key):
        model = nnx.merge(encoder.program.factory.graphdef, params, stats, copy=True)
        return reconstruction_errors(method, model, images, key)

    errors = jax.jit(errors)
    starts = range(0, len(encoder.test) - size + 1, size)
    if not starts:
        raise UserError(f"config.eval.batch_size = {size}: the test split has {len(encoder.test)} images; use less")
    each = [
        errors(encoder.params, encoder.stats, encoder.test.batch(np.arange(i, i + size))["image"], jax.random.key(i))
        for i in starts
    ]
    model, guess = np.mean(each, axis=0).tolist()
    return {"error": model, "visible_mean_error": guess, "ratio": model / guess, "images": len(starts) * size}
