"""Encoders in our own format: model.safetensors with the names of our modules, and a config.json that rebuilds them."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.base.classes import find_class
from jepa_jax.base.errors import UserError
from jepa_jax.config.owners import MODELS, named_group
from jepa_jax.config.schema import flatten, nested, with_variants
from jepa_jax.models.registry import DTYPES
from jepa_jax.weights.family import needed
from jepa_jax.weights.names import load_into

FORMAT = "jepa_jax"
VERSION = 1


def rebuilt_encoder(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], origin: pathlib.Path) -> Any:
    """Returns the encoder that an exported config.json describes, with these variables.

    Raises:
        UserError: a variable is missing, left over or has another shape; the config is of a later version.
    """
    if config.get("version") != VERSION:
        raise UserError(f"{origin}: format version {config.get('version')}; this version of jepa_jax reads {VERSION}")
    encoder = _abstract(config, origin)
    load_into(encoder, tensors, None, origin, "export it again")
    return encoder


def model_group(config: Mapping[str, Any], origin: object) -> Any:
    """Returns the `model` group of an exported config.json."""
    values = flatten(needed(config, "model", origin))
    name = values["name"]
    group: Any = with_variants(named_group("model", name), values)
    return group(**nested(values))


def _abstract(config: Mapping[str, Any], origin: object) -> Any:
    """Returns the encoder without arrays; dropout is left out, since an exported encoder is not trained."""
    group = model_group(config, origin)
    if getattr(group, "drop_path", 0.0):
        group = type(group)(**{**vars(group), "drop_path": 0.0})
    size, channels = needed(config, "view_size", origin), needed(config, "channels", origin)
    sample = jax.ShapeDtypeStruct((64, size, size, channels), jnp.float32)
    cls, dtype = find_class("model.name", group.name, MODELS), DTYPES[config.get("precision", "float32")]

    def make(images: jax.Array) -> Any:
        return cls.from_config(group, images, view_size=size, dtype=dtype, remat="none", rngs=nnx.Rngs(0))

    return nnx.eval_shape(make, sample)
