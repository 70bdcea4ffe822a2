"""A recurrent predictor: a GRU whose state is the latent and whose input is the action."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.models.kernels.linear import linear


class GruPredictor(nnx.Module):
    """Maps a latent and an action to the next latent, before the norm of latents.

    The gates decide which numbers of the latent an action changes, so that what stays, such as walls, is easy to keep.
    """

    memory = 1  # latents that a prediction depends on

    def __init__(self, latents: int, actions: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.of_latent = linear(latents, 3 * latents, dtype, rngs)
        self.of_action = linear(actions, 3 * latents, dtype, rngs)

    def __call__(
        self, latents: Float[Array, "b t d"], actions: Float[Array, "b t a"], *, train: bool = False
    ) -> Float[Array, "b t d"]:
        """Returns what follows each latent under its action."""
        del train
        kept, update, new = jnp.split(self.of_latent(latents), 3, axis=-1)
        kept_in, update_in, new_in = jnp.split(self.of_action(actions), 3, axis=-1)
        gate = jax.nn.sigmoid(update + update_in)
        candidate = jnp.tanh(new_in + jax.nn.sigmoid(kept + kept_in) * new)
        return gate * latents + (1 - gate) * candidate
