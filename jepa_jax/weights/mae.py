"""A masked autoencoder as a whole: encoder, decoder, and its outputs for a given mask."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from jepa_jax.models.predictor import Predictor
from jepa_jax.models.tokens import Patches, patch_statistics, patchify, take_tokens
from jepa_jax.models.vit import ViT


class MaeOutputs(NamedTuple):
    """What a masked autoencoder gives for images and noise."""

    logits: Patches  # predicted patches, all of them, row by row
    mask: Float[Array, "b n"]  # 1 for hidden patches, 0 for visible ones
    ids_restore: Integer[Array, "b n"]  # where each patch lies in the order of its noise
    loss: Float[Array, ""]  # mean squared error of the hidden patches


class MaeModel(nnx.Module):
    """Encodes the patches with the least noise and predicts all of them.

    Attributes:
      mask_ratio: part of the patches that is hidden.
      norm_pix: whether patches are predicted in units of their own mean and deviation.
    """

    def __init__(self, encoder: ViT, decoder: Predictor, *, mask_ratio: float, norm_pix: bool):
        self.encoder, self.decoder = encoder, decoder
        self.mask_ratio, self.norm_pix = mask_ratio, norm_pix

    def __call__(self, images: Float[Array, "b h w c"], noise: Float[Array, "b n"]) -> MaeOutputs:
        order = jnp.argsort(noise, axis=1)
        restore = jnp.argsort(order, axis=1)
        visible, hidden = jnp.split(order, [int(noise.shape[1] * (1 - self.mask_ratio))], axis=1)
        outputs = self.encoder.encode(self.encoder.embed(images, visible))
        leading, context = jnp.split(outputs, [self.encoder.num_cls], axis=1)
        predicted = self.decoder(context, visible, hidden, leading=leading, with_context=True)
        logits = take_tokens(predicted, restore)
        mask = (restore >= visible.shape[1]).astype(jnp.float32)
        wanted = patchify(images, self.encoder.patch_size)
        if self.norm_pix:
            mean, deviation = patch_statistics(wanted)
            wanted = (wanted - mean) / deviation
        errors = jnp.mean(jnp.square(logits - wanted), axis=-1)
        return MaeOutputs(logits, mask, restore, jnp.sum(errors * mask) / jnp.sum(mask))
