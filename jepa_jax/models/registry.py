"""Encoders by the name that `model.name` gives them."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jepa_jax.errors import UserError
from jepa_jax.models import resnet, vit

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def build_encoder(model: Any, *, image_size: int, precision: str, remat: str, rngs: nnx.Rngs) -> nnx.Module:
    """The encoder of the `model` group; it maps normalised images to features and knows its `feature_dim`."""
    options = {"dtype": DTYPES[precision], "remat": remat == "full", "rngs": rngs}
    if model.name in resnet.SIZES:
        blocks, bottleneck = resnet.SIZES[model.name]
        return resnet.ResNet(blocks, bottleneck=bottleneck, stem=model.stem, width=model.width, **options)
    if model.name in vit.SIZES:
        width, depth, heads = vit.SIZES[model.name]
        if image_size % model.patch_size:
            raise UserError(
                f"model.patch_size = {model.patch_size}: does not divide the {image_size}-pixel views; "
                f"set model.patch_size or data.augment.crop.size"
            )
        return vit.ViT(
            width, depth, heads, image_size=image_size, patch_size=model.patch_size, pool=model.pool, **options
        )
    raise UserError(f"model.name = {model.name!r}: not one of {', '.join([*resnet.SIZES, *vit.SIZES])}")
