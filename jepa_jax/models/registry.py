"""Encoders by the name that `model.name` gives them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.models import patchnet, resnet, vit

Encoder = patchnet.PatchNet | resnet.ResNet | vit.ViT
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def build_encoder(
    model: Any, sample: jax.Array, *, view_size: int, precision: str, remat: str, rngs: nnx.Rngs
) -> Encoder:
    """The encoder of the `model` group; it maps normalised images to features and knows its `feature_dim`.

    Args:
        sample: normalised training images, for encoders that initialise themselves from data.
        view_size: pixels a side of what the encoder will be trained on.
    """
    options = {"dtype": DTYPES[precision], "remat": remat == "full", "rngs": rngs}
    if model.name in resnet.SIZES:
        blocks, bottleneck = resnet.SIZES[model.name]
        return resnet.ResNet(blocks, bottleneck=bottleneck, stem=model.stem, width=model.width, **options)
    if model.name == "vit" or model.name in vit.SIZES:
        width, depth, heads = vit.SIZES.get(model.name) or (model.width, model.depth, model.heads)
        if view_size % model.patch_size:
            raise UserError(
                f"model.patch_size = {model.patch_size}: does not divide the {view_size}-pixel views; "
                f"set model.patch_size or data.augment.crop.size"
            )
        return vit.ViT(
            width,
            depth,
            heads,
            image_size=view_size,
            patch_size=model.patch_size,
            pool=model.pool,
            cls_token=model.cls_token,
            positions=model.positions,
            **options,
        )
    if model.name == "patchnet":
        if not model.stride <= model.patch_size <= view_size:
            raise UserError(
                f"model.patch_size = {model.patch_size}: must lie between model.stride = {model.stride} and the "
                f"{view_size} pixels of a view"
            )
        if (view_size - model.patch_size) // model.stride < 1:
            raise UserError(
                f"model.patch_size = {model.patch_size}: leaves one patch in {view_size} pixels; use a smaller one"
            )
        if model.stem_width > 3 * model.patch_size**2:
            raise UserError(
                f"model.stem_width = {model.stem_width}: a patch has {3 * model.patch_size**2} principal directions"
            )
        return patchnet.PatchNet(
            sample,
            patch_size=model.patch_size,
            stride=model.stride,
            stem_width=model.stem_width,
            widths=model.widths,
            **options,
        )
    raise UserError(
        f"model.name = {model.name!r}: not one of {', '.join([*resnet.SIZES, *vit.SIZES, 'vit', 'patchnet'])}"
    )
