"""Random keys for the parameters of modules."""

from typing import Any

import jax
from flax import nnx


class InitStream(nnx.RngStream):
    """Gives the same keys as `nnx.RngStream`, and counts them in Python instead of in an array.

    While a model is traced, an array is a tracer, and each update of flax's count lets JAX go through all operations
    traced so far, for the text of an error that flax ignores: the time grows with the square of the layers.
    """

    def __init__(self, key: jax.Array | int, *, tag: str):
        super().__init__(key, tag=tag)
        self.drawn = 0

    def __call__(self) -> jax.Array:
        key = jax.random.fold_in(self.key[...], self.drawn)
        self.drawn += 1
        return key


def init_rngs(key: jax.Array | int) -> nnx.Rngs:
    """Returns what `nnx.Rngs(params=key)` does, for the construction of modules."""
    rngs: Any = nnx.Rngs()
    rngs.params = InitStream(key, tag="params")
    return rngs
