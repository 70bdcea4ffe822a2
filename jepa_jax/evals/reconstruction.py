"""Error of a masked autoencoder on hidden patches of held-out images, compared with the simplest guess."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.evals.trained_encoder import TrainedEncoder
from jepa_jax.methods.contract import Batch
from jepa_jax.methods.mae import MaskedAutoencoder
from jepa_jax.methods.masking import random_split
from jepa_jax.models.tokens import patchify, take_tokens


def reconstruction_errors(method: MaskedAutoencoder, model: Any, batch: Batch, key: jax.Array) -> jax.Array:
    """Returns [2]: mean squared error over hidden pixels of the model, and of each image's mean visible colour."""
    view = method.whole(batch["image"], method.view_size)
    visible, hidden = random_split(key, len(view), method.tokens, method.visible_tokens)
    patches = patchify(view, method.patch_size)
    wanted = take_tokens(patches, hidden)
    painted = method.reconstruct(model, view, visible, hidden)
    seen = take_tokens(patches, visible).reshape(len(view), -1, method.channels)
    guess = jnp.tile(jnp.mean(seen, axis=1), wanted.shape[-1] // method.channels)[:, None]  # one colour for all pixels
    return jnp.stack([jnp.mean(jnp.square(painted - wanted)), jnp.mean(jnp.square(guess - wanted))])


def held_out_reconstruction(encoder: TrainedEncoder) -> dict[str, float]:
    """Returns the errors over the test split, in squared units of normalised pixels, and their ratio."""
    method, size = encoder.program.method, encoder.config.eval.batch_size
    if not isinstance(method, MaskedAutoencoder):
        name = encoder.config.method.name
        raise UserError(f"config.method.name = {name!r}: does not reconstruct images; give a run of mae")
    starts = range(0, len(encoder.test) - size + 1, size)
    if not starts:
        raise UserError(f"config.eval.batch_size = {size}: the test split has {len(encoder.test)} images; use less")

    @jax.jit
    def errors(params: Any, stats: Any, batch: Batch, key: jax.Array) -> jax.Array:
        return reconstruction_errors(method, encoder.program.factory.merge(params, stats), batch, key)

    each = []
    for start in starts:
        batch = {"image": encoder.test.batch(np.arange(start, start + size))["image"]}
        each.append(errors(encoder.params, encoder.stats, batch, jax.random.key(start)))
    model, guess = np.mean(each, axis=0).tolist()
    return {"error": model, "visible_mean_error": guess, "ratio": model / guess, "images": len(starts) * size}
