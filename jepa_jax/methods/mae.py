"""Masked autoencoder: from the visible patches of an image, paint the hidden ones.

Reference: He et al., "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022. The encoder sees visible patches
only; a light decoder fills in the rest; the error counts hidden patches only. An average of the weights follows with
momentum min(ema_momentum, (1 + n) / (10 + n)), so that it is of use from the first steps on.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.methods import Ema, Output
from jepa_jax.methods.masked import MaskedMethod
from jepa_jax.methods.masking import random_split
from jepa_jax.models.predictor import Predictor
from jepa_jax.models.tokens import take_tokens
from jepa_jax.models.vit import ViT, patchify, unpatchify

PATCH_EPS = 1e-6  # of a patch's variance, where patches are normalised


class EncoderDecoder(nnx.Module):
    """The encoder that is kept and the decoder that paints."""

    def __init__(self, encoder: ViT, decoder: Predictor):
        self.encoder = encoder
        self.decoder = decoder


class MaskedAutoencoder(MaskedMethod):
    """See `jepa_jax.methods.Method`."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.tokens = self.grid**2
        self.visible_tokens = max(1, min(self.tokens - 1, round((1 - self.config.mask_ratio) * self.tokens)))
        self.ema = Ema(("encoder", "decoder"), ramped_momentum(self.config.ema_momentum))

    def init(self, key: jax.Array, sample: jax.Array) -> EncoderDecoder:
        rngs = nnx.Rngs(params=key)
        encoder = self.build_encoder(sample, rngs)
        decoder = Predictor(
            encoder.feature_dim,
            3 * self.model.patch_size**2,
            width=self.config.decoder_width,
            depth=self.config.decoder_depth,
            heads=self.config.decoder_heads,
            **self.predictor_options(rngs),
        )
        return EncoderDecoder(encoder, decoder)

    def loss(
        self, model: EncoderDecoder, target: Any, batch: dict[str, jax.Array], key: jax.Array, step: jax.Array
    ) -> Output:
        del target, step  # the averaged weights are for use, not for learning
        view_key, mask_key = jax.random.split(key)
        view = self.view(batch["image"], view_key)
        visible, hidden = random_split(mask_key, len(view), self.tokens, self.visible_tokens)
        outputs, painted = self._paint(model, view, visible, hidden)
        with jax.named_scope("loss"):
            wanted = take_tokens(patchify(view, self.model.patch_size), hidden)
            if self.config.norm_pix:
                mean, deviation = patch_statistics(wanted)
                wanted = (wanted - mean) / deviation
            loss = jnp.mean(jnp.square(painted.astype(jnp.float32) - wanted))
        return Output(loss, {}, model.encoder.pooled(outputs).astype(jnp.float32))

    def example_views(self, images: jax.Array, key: jax.Array) -> jax.Array:
        """The view and what the encoder sees of it."""
        view_key, mask_key = jax.random.split(key)
        view = self.view(images, view_key)
        visible, _ = random_split(mask_key, len(view), self.tokens, self.visible_tokens)
        return jnp.stack([view, self.shown(view, visible)])

    def pictures(self, model: EncoderDecoder, images: jax.Array, key: jax.Array) -> jax.Array:
        """Original, masked and reconstructed images: visible patches as they are, hidden ones as painted."""
        view = self.whole(images)
        visible, hidden = random_split(key, len(view), self.tokens, self.visible_tokens)
        painted = self.reconstruct(model, view, visible, hidden)
        patches = jnp.concatenate([take_tokens(patchify(view, self.model.patch_size), visible), painted], axis=1)
        where = jnp.argsort(jnp.concatenate([visible, hidden], axis=1), axis=1)
        whole = unpatchify(take_tokens(patches, where), self.model.patch_size)
        return jnp.stack([view, self.shown(view, visible), whole])

    def reconstruct(self, model: EncoderDecoder, view: jax.Array, visible: jax.Array, hidden: jax.Array) -> jax.Array:
        """Pixels of the hidden patches, normalised as the view: [B, n, patch_size^2 * 3].

        A model of normalised patches knows their pattern, not their mean and deviation: those are taken from the image.
        """
        _, painted = self._paint(model, view, visible, hidden)
        painted = painted.astype(jnp.float32)
        if self.config.norm_pix:
            mean, deviation = patch_statistics(take_tokens(patchify(view, self.model.patch_size), hidden))
            painted = painted * deviation + mean
        return painted

    def _paint(
        self, model: EncoderDecoder, view: jax.Array, visible: jax.Array, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The encoder's outputs (CLS in front if there is one) and the decoder's patches at `hidden`."""
        with jax.named_scope("encoder"):
            outputs = model.encoder.encode(model.encoder.embed(view, visible))
        with jax.named_scope("predictor"):
            return outputs, model.decoder(outputs[:, model.encoder.num_cls :], visible, hidden)


def patch_statistics(patches: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and deviation of each patch's pixels [..., n] -> [..., 1]."""
    mean = jnp.mean(patches, axis=-1, keepdims=True)
    return mean, jnp.sqrt(jnp.var(patches, axis=-1, keepdims=True, ddof=1) + PATCH_EPS)


def ramped_momentum(momentum: float):
    """min(momentum, (1 + n) / (10 + n)) at step n."""
    return lambda step: jnp.minimum(momentum, (1 + step) / (10 + step))
