"""Methods: what is learned, one file a method. Loop, step, evals and planner know only this contract."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx

from jepa_jax.base.errors import UserError


class Output(NamedTuple):
    """What a method's loss gives the step."""

    loss: jax.Array  # scalar
    terms: dict[str, jax.Array]  # named scalars for the metrics
    features: jax.Array  # [B, F] of the batch's images, for the online probe; the step detaches them


class Ema(NamedTuple):
    """A copy of parts of the model that follows them slowly; it starts equal to them."""

    modules: tuple[str, ...]  # attributes of the model
    momentum: Callable[[jax.Array], jax.Array]  # by step; 1 keeps the copy as it is


class Method(Protocol):
    """A learning method; it never touches meshes, optimizers or writers. `model` is what its own `init` made."""

    levels: int  # scales that features can be read at; 0 is the finest
    ema: Ema | None

    def init(self, key: jax.Array, sample: jax.Array) -> nnx.Module:
        """Parameters and statistics; `sample` is a uint8 batch of training images."""
        ...

    def loss(self, model: Any, target: Any, batch: dict[str, jax.Array], key: jax.Array, step: jax.Array) -> Output:
        """The loss of a batch of uint8 images; updates the model's statistics in place.

        `target` is the model with the weights of its slow copy, without gradient; None for a method without `ema`.
        """
        ...

    def features(
        self, model: Any, images: jax.Array, *, level: int = 0, normalised: bool = True, train: bool = False
    ) -> jax.Array:
        """What probes and users read from uint8 images: [B, feature_dim], float32, no augmentation.

        With `train`, batch norm uses and updates the statistics of this batch. Without `normalised`, before the
        encoder's last layer norm, which would hide that features have become constant.
        """
        ...

    def feature_map(self, model: Any, images: jax.Array) -> jax.Array | None:
        """Features of each patch: [B, rows, columns, F]; None for an encoder without a grid of tokens."""
        ...

    def example_views(self, images: jax.Array, key: jax.Array) -> jax.Array:
        """What the loss sees of these images, normalised: [V, B, h, w, 3], for the report."""
        ...

    def pictures(self, model: Any, images: jax.Array, key: jax.Array) -> jax.Array | None:
        """What the model makes of these images, normalised: [V, B, h, w, 3]; None where there is nothing to see."""
        ...


NAMES = ("image_jepa", "ijepa", "hjepa", "mae")


def build_method(config: Any, *, total_steps: int) -> Method:
    """The method that `config.method.name` names; `total_steps` is the length of its schedules."""
    name = config.method.name
    if name == "image_jepa":
        from jepa_jax.methods.image_jepa import ImageJepa

        return ImageJepa(config)
    if name == "ijepa":
        from jepa_jax.methods.ijepa import IJepa

        return IJepa(config, total_steps=total_steps)
    if name == "hjepa":
        from jepa_jax.methods.hjepa import HJepa

        return HJepa(config, total_steps=total_steps)
    if name == "mae":
        from jepa_jax.methods.mae import MaskedAutoencoder

        return MaskedAutoencoder(config)
    raise UserError(f"config.method.name = {name!r}: unknown; use one of {', '.join(NAMES)}")
