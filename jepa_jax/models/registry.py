"""Encoders by the name that `model.name` gives them."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.base.classes import find_class
from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.owners import MODELS
from jepa_jax.models.pooling import EncoderOutputs, PoolingEncoder

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class Encoder(Protocol):
    """An nnx.Module that maps normalised images [B, H, W, C] to features [B, feature_dim]."""

    Keys: ClassVar[type[NamedGroup]]  # its keys of the `model` group
    feature_dim: int

    @classmethod
    def from_config(
        cls, config: Any, sample: Float[Array, "n h w c"], *, view_size: int, dtype: Any, remat: str, rngs: nnx.Rngs
    ) -> Any:
        """Returns an encoder.

        Args:
          config: the `model` group.
          sample: normalised training images, for encoders that initialise themselves from data.
          view_size: pixels per side of the images that the encoder will be trained on.
          remat: what the backward pass recomputes (`train.remat`), for `jepa_jax.models.remat.rematerialized`.
        """

    def __call__(self, images: Float[Array, "b h w c"], *, train: bool = False) -> jax.Array:
        """With `train`, batch norm and dropout behave as in training."""


@runtime_checkable
class PatchEncoder(PoolingEncoder, Protocol):
    """An encoder of square patches, each of which has an output."""

    evaluated_at_view_size: bool  # whether images are resized to the size of views before they are evaluated

    def patches(self, images: Float[Array, "b h w c"]) -> Float[Array, "b n d"]:
        """Returns the outputs of all patches, row by row."""


@runtime_checkable
class LayeredEncoder(Protocol):
    """An encoder of blocks whose outputs can be pooled like those of the last one."""

    def layer_outputs(self, images: Float[Array, "b h w c"], count: int) -> list[EncoderOutputs]:
        """Returns the outputs of the last `count` blocks, or of all if there are fewer, the last one last."""


@runtime_checkable
class AttentionEncoder(Protocol):
    """An encoder of square patches whose attention can be shown."""

    def attention_maps(self, images: Float[Array, "b h w c"]) -> Float[Array, "b heads rows columns"]:
        """Returns how much of each patch the heads of the last block read."""


@runtime_checkable
class StructuredEncoder(Protocol):
    """An encoder class that knows which of its keys decide which weights fit it."""

    def structure(self, config: Any) -> dict[str, Any]:
        """Returns these facts by key of the `model` group, with sizes that `model.name` stands for written out."""


def encoder_structure(model: NamedGroup) -> dict[str, Any]:
    """Returns the facts of a `model` group that decide which weights fit; see `Encoder`."""
    encoder = find_class("model.name", model.name, MODELS)
    if isinstance(encoder, StructuredEncoder):
        return encoder.structure(model)
    free = ("init_from", "pool", "drop_path")
    return {name: value for name, value in vars(model).items() if name not in free}


def encoder_kind(structure: Mapping[str, Any], name: str) -> str:
    """Returns what to call an encoder of this structure: the name that takes any sizes, or else its own."""
    return "vit" if "heads" in structure else "resnet" if "bottleneck" in structure else name


def build_encoder(config: Config, sample: Float[Array, "n h w c"], rngs: nnx.Rngs) -> Any:
    """Returns the encoder that `config.model` describes, for views of `config.data.view_size` pixels."""
    encoder = find_class("model.name", config.model.name, MODELS).from_config(
        config.model,
        sample,
        view_size=config.data.view_size,
        dtype=DTYPES[config.train.precision],
        remat=config.train.remat,
        rngs=rngs,
    )
    pools = encoder.pools if isinstance(encoder, PoolingEncoder) else ("mean",)
    if config.eval.pool not in pools:
        raise UserError(
            f"config.eval.pool = {config.eval.pool!r}: the outputs of model.name = {config.model.name} cannot be "
            f"pooled like that; use {' or '.join(pools)}"
        )
    return encoder
