"""A residual predictor: a perceptron adds to the latent what the action changes."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.models.kernels.linear import linear


class ResidualPredictor(nnx.Module):
    """Maps a latent and an action to the next latent, before the norm of latents.

    Its hidden layers see both together: whether a wall stops a move depends on where and on which way.
    """

    memory = 1  # latents that a prediction depends on

    def __init__(
        self, latents: int, actions: int, *, hidden: tuple[int, ...], dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        sizes = (latents + actions, *hidden)
        self.hidden = nnx.List([linear(i, o, dtype, rngs) for i, o in itertools.pairwise(sizes)])
        self.leave = linear(hidden[-1], latents, dtype, rngs)

    def __call__(
        self, latents: Float[Array, "b t d"], actions: Float[Array, "b t a"], *, train: bool = False
    ) -> Float[Array, "b t d"]:
        """Returns what follows each latent under its action."""
        del train  # it has no dropout
        x = jnp.concatenate([latents, actions.astype(latents.dtype)], axis=-1)
        for layer in self.hidden:
            x = jax.nn.relu(layer(x))
        return latents + self.leave(x)
