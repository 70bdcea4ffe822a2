"""Masked autoencoder: from the visible patches of an image, reconstruct the hidden ones.

Reference: He et al., "Masked Autoencoders Are Scalable Vision Learners", CVPR 2022. The encoder sees visible patches
only; a light decoder fills in the rest; the error counts hidden patches only. An average of the weights follows with
momentum min(ema_momentum, (1 + n) / (10 + n)), so that it is useful from the first steps on.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jepa_jax.config.groups import Config
from jepa_jax.config.schema import PROBABILITY, Problem, key
from jepa_jax.methods.contract import Batch, Ema, Output
from jepa_jax.methods.image_method import EncoderWith
from jepa_jax.methods.masked import MaskedConfig, MaskedMethod, View, width_problem
from jepa_jax.methods.masking import random_split
from jepa_jax.models.predictor import Predictor
from jepa_jax.models.rngs import init_rngs
from jepa_jax.models.tokens import Patches, patch_statistics, patchify, take_tokens, unpatchify

Places = Integer[Array, "b _"]


@dataclasses.dataclass(frozen=True)
class MaeConfig(MaskedConfig):
    mask_ratio: float = key(0.75, "part of the patches that is hidden", least=0.01, most=0.99)
    norm_pix: bool = key(True, "whether each patch is reconstructed in units of its own mean and deviation")
    decoder_width: int = key(128, "numbers per token of the decoder", least=4)
    decoder_depth: int = key(2, "blocks of the decoder", least=1)
    decoder_heads: int = key(4, "attention heads of the decoder", least=1)
    ema_momentum: float = key(0.9999, "momentum of the averaged weights, after a ramp", **PROBABILITY)

    def problems(self, config: Config) -> Iterator[Problem]:
        yield from width_problem("decoder", self.decoder_width, self.decoder_heads)


class MaskedAutoencoder(MaskedMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = MaeConfig

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        self.tokens = self.grid**2
        self.visible_tokens = max(1, min(self.tokens - 1, round((1 - self.config.mask_ratio) * self.tokens)))
        self.ema = Ema(("encoder", "decoder"), lambda n: jnp.minimum(self.config.ema_momentum, (1 + n) / (10 + n)))

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs = init_rngs(key)
        encoder = self.encoder(sample, rngs)
        decoder = Predictor(
            encoder.feature_dim,
            self.run_config.data.channels * self.patch_size**2,
            width=self.config.decoder_width,
            depth=self.config.decoder_depth,
            heads=self.config.decoder_heads,
            **self.predictor_options(rngs),
        )
        return EncoderWith(encoder, decoder=decoder)

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        del target, step  # the averaged weights are for use, not for learning
        view_key, mask_key = jax.random.split(key)
        view = self.view(batch, view_key)
        visible, hidden = random_split(mask_key, len(view), self.tokens, self.visible_tokens)
        painted = self._paint(model, view, visible, hidden, train=True)
        with jax.named_scope("loss"):
            wanted = take_tokens(patchify(view, self.patch_size), hidden)
            if self.config.norm_pix:
                mean, deviation = patch_statistics(wanted)
                wanted = (wanted - mean) / deviation
            loss = jnp.mean(jnp.square(painted.astype(jnp.float32) - wanted))
        # No features for the online probe: it would be trained on a quarter of the patches, and of other weights, than
        # those that it is scored on, and whole images would double the cost of a step.
        return Output(loss, {})

    def example_views(self, batch: Batch, key: jax.Array) -> Float[Array, "v b h w c"]:
        """Returns the view and what the encoder sees of it."""
        view_key, mask_key = jax.random.split(key)
        view = self.view(batch, view_key)
        visible, _ = random_split(mask_key, len(view), self.tokens, self.visible_tokens)
        return jnp.stack([view, self.shown(view, visible)])

    def pictures(self, model: Any, batch: Batch, key: jax.Array) -> Float[Array, "v b h w c"]:
        """Returns original, masked and reconstructed images; visible patches are copied from the original."""
        view = self.whole(batch["image"], self.view_size)
        visible, hidden = random_split(key, len(view), self.tokens, self.visible_tokens)
        painted = self.reconstruct(model, view, visible, hidden)
        patches = jnp.concatenate([take_tokens(patchify(view, self.patch_size), visible), painted], axis=1)
        where = jnp.argsort(jnp.concatenate([visible, hidden], axis=1), axis=1)
        whole = unpatchify(take_tokens(patches, where), self.patch_size)
        return jnp.stack([view, self.shown(view, visible), whole])

    def reconstruct(self, model: Any, view: View, visible: Places, hidden: Places) -> Patches:
        """Returns the pixels of the hidden patches, normalised as the view.

        A model of normalised patches predicts their pattern, not their mean and deviation, which come from the image.
        """
        painted = self._paint(model, view, visible, hidden).astype(jnp.float32)
        if self.config.norm_pix:
            mean, deviation = patch_statistics(take_tokens(patchify(view, self.patch_size), hidden))
            painted = painted * deviation + mean
        return painted

    def _paint(self, model: Any, view: View, visible: Places, hidden: Places, *, train: bool = False) -> Patches:
        """Returns the decoder's patches at `hidden`; as in the original, it also reads a CLS token."""
        with jax.named_scope("encoder"):
            encoder = model.encoder
            outputs = encoder.encode(encoder.embed(view, visible), encoder.rotation(view, visible), train=train)
        with jax.named_scope("predictor"):
            leading, context = jnp.split(outputs, [encoder.num_leading], axis=1)
            return model.decoder(context, visible, hidden, leading=leading)
