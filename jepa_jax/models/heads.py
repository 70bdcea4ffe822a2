"""Heads on an encoder: the projector that a joint-embedding loss reads, and the linear probe."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.models.kernels.norm import BatchNorm


class Projector(nnx.Module):
    """Applies Linear, BatchNorm and ReLU for every width but the last, which is Linear alone; returns float32."""

    def __init__(self, inputs: int, widths: Sequence[int], *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        sizes = [inputs, *widths]
        self.layers = nnx.List([
            nnx.Linear(i, o, dtype=dtype, rngs=rngs) for i, o in zip(sizes[:-1], sizes[1:], strict=True)
        ])  # fmt: skip
        self.norms = nnx.List([BatchNorm(width, dtype=dtype, rngs=rngs) for width in widths[:-1]])

    def __call__(self, x: Float[Array, "*b inputs"], *, train: bool = False) -> Float[Array, "*b outputs"]:
        for layer, norm in zip(self.layers[:-1], self.norms, strict=True):
            x = jax.nn.relu(norm(layer(x), train=train))
        return self.layers[-1](x).astype(jnp.float32)


def probe_logits(probe: Mapping[str, Any], features: Float[Array, "b f"]) -> Float[Array, "b classes"]:
    """Applies a linear classifier that is a plain dict of `kernel` and `bias`: it belongs to no method."""
    return features @ probe["kernel"] + probe["bias"]


def init_probe(feature_dim: int, num_classes: int) -> dict[str, jax.Array]:
    """Returns zeros: the loss is convex, so no randomness is needed."""
    return {"kernel": jnp.zeros((feature_dim, num_classes)), "bias": jnp.zeros(num_classes)}
