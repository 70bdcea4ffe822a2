"""Measures the reconstruction error of a masked autoencoder on held-out images, relative to the mean visible colour.

  jepa-jax train --config=mae_quickstart --workdir=runs/mae_quickstart
  python profiling/check_reconstruction.py --workdir=runs/mae_quickstart

A ratio below 1 means that the model guesses hidden patches better than each image's mean visible colour does.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.evals.inference import FrozenEncoder, load_run
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
    channels = view.shape[-1]
    seen = take_tokens(patches, visible).reshape(len(view), -1, channels)
    guess = jnp.tile(jnp.mean(seen, axis=1), wanted.shape[-1] // channels)[:, None]  # one colour for all pixels
    return jnp.stack([jnp.mean(jnp.square(painted - wanted)), jnp.mean(jnp.square(guess - wanted))])


def held_out_reconstruction(encoder: FrozenEncoder) -> dict[str, float]:
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


def add_flags(parser: Parser) -> None:
    parser.add_flag("workdir", "DIR", "folder of a run of method mae", required=True)


def check(arguments: Arguments, console: Console) -> Result:
    result = held_out_reconstruction(load_run(arguments.workdir).encoder)
    errors = f"error {result['error']:.4f}, of the visible mean {result['visible_mean_error']:.4f}"
    ratio = f"ratio {result['ratio']:.3f} over {result['images']:,} held-out images"
    return Result([result], f"{errors}, {ratio}")


if __name__ == "__main__":
    sys.exit(Command("profiling/check_reconstruction.py", __doc__, add_flags, check, program="python").main())
