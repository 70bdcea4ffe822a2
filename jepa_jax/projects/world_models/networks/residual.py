"""A residual predictor: a perceptron adds to the latent what the action changes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.models.kernels.linear import linear


class ResidualPredictor(nnx.Module):
    """Maps a latent and an action to the next latent, before the norm of latents.

    Its hidden layer sees both together: whether a wall stops a move depends on where and on which way.
    """

    memory = 1  # latents that a prediction depends on

    def __init__(self, latents: int, actions: int, *, hidden: int, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.enter = linear(latents + actions, hidden, dtype, rngs)
        self.leave = linear(hidden, latents, dtype, rngs)

    def __call__(
        self, latents: Float[Array, "b t d"], actions: Float[Array, "b t a"], *, train: bool = False
    ) -> Float[Array, "b t d"]:
        """Returns what follows each latent under its action."""
        del train  # it has no dropout
        both = jnp.concatenate([latents, actions.astype(latents.dtype)], axis=-1)
        return latents + self.leave(jax.nn.relu(self.enter(both)))
