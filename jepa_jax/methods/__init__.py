"""Methods: what is learned, one file a method. Loop, step, evals and planner know only this contract."""

from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx

from jepa_jax.errors import UserError


class Output(NamedTuple):
    """What a method's loss gives the step."""

    loss: jax.Array  # scalar
    terms: dict[str, jax.Array]  # named scalars for the metrics
    features: jax.Array  # [B, F] of the batch's images, for the online probe; the step detaches them


class Method(Protocol):
    """A learning method; it never touches meshes, optimizers or writers. `model` is what its own `init` made."""

    def init(self, key: jax.Array, sample: jax.Array) -> nnx.Module:
        """Parameters and statistics; `sample` is a uint8 batch of training images."""
        ...

    def loss(self, model: Any, batch: dict[str, jax.Array], key: jax.Array, step: jax.Array) -> Output:
        """The loss of a batch of uint8 images; updates the model's statistics in place."""
        ...

    def features(self, model: Any, images: jax.Array, *, train: bool = False) -> jax.Array:
        """What probes and users read from uint8 images: [B, feature_dim], float32, no augmentation.

        With `train`, batch norm uses and updates the statistics of this batch.
        """
        ...

    def example_views(self, images: jax.Array, key: jax.Array) -> jax.Array:
        """What the loss sees of these images, normalised: [V, B, h, w, 3], for the report."""
        ...


def build_method(config: Any) -> Method:
    """The method that `config.method.name` names."""
    if config.method.name == "image_jepa":
        from jepa_jax.methods.image_jepa import ImageJepa

        return ImageJepa(config)
    raise UserError(f"config.method.name = {config.method.name!r}: unknown; use image_jepa")
