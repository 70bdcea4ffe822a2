"""Image JEPA: augmented views of an image agree in embedding space, a second term keeps the embedding from collapsing.

One encoder, one projector, no target network and no predictor. Losses: VICReg, SIGReg (LeJEPA), BCS (EB-JEPA), InfoNCE.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.data.augment import augment_views, normalise, whole_view
from jepa_jax.losses.infonce import infonce_loss
from jepa_jax.losses.sigreg import bcs_loss, random_slices, sigreg_loss
from jepa_jax.losses.vicreg import vicreg_loss
from jepa_jax.methods import Ema, Output
from jepa_jax.models.heads import Projector
from jepa_jax.models.registry import DTYPES, Encoder, build_encoder
from jepa_jax.models.vit import ViT


class EncoderProjector(nnx.Module):
    """The encoder that is kept and the projector that only the loss reads."""

    def __init__(self, encoder: Encoder, projector: Projector):
        self.encoder = encoder
        self.projector = projector


class ImageJepa:
    """See `jepa_jax.methods.Method`."""

    levels = 1
    ema: Ema | None = None

    def __init__(self, config: Any):
        self.config = config.method
        self.model = config.model
        self.augment = config.data.augment
        self.precision, self.remat = config.train.precision, config.train.remat
        self.view_size = self.augment.crop.size or config.data.image_size

    def init(self, key: jax.Array, sample: jax.Array) -> EncoderProjector:
        rngs = nnx.Rngs(params=key)
        encoder = build_encoder(
            self.model,
            normalise(sample, self.augment.mean, self.augment.std),
            view_size=self.view_size,
            precision=self.precision,
            remat=self.remat,
            rngs=rngs,
        )
        projector = Projector(encoder.feature_dim, self.config.projector, dtype=DTYPES[self.precision], rngs=rngs)
        return EncoderProjector(encoder, projector)

    def loss(
        self, model: EncoderProjector, target: None, batch: dict[str, jax.Array], key: jax.Array, step: jax.Array
    ) -> Output:
        del target, step
        view_key, slice_key = jax.random.split(key)
        views = self.example_views(batch["image"], view_key)  # [V, B, h, w, 3]
        if self.config.per_view_statistics:
            outputs = [self._embed(model, view) for view in views]
            features, z = outputs[0][0], jnp.stack([z for _, z in outputs])  # [V, B, D]
        else:
            # Images stay the outer axis, so that a batch split over devices stays where it is.
            together = jnp.swapaxes(views, 0, 1).reshape(-1, *views.shape[2:])  # [B V, h, w, 3]
            features, z = self._embed(model, together)
            features = features[:: len(views)]
            z = jnp.swapaxes(z.reshape(-1, len(views), z.shape[-1]), 0, 1)
        with jax.named_scope("loss"):
            loss, terms = self._objective(z, slice_key)
        return Output(loss, terms, features)

    def features(
        self,
        model: EncoderProjector,
        images: jax.Array,
        *,
        level: int = 0,
        normalised: bool = True,
        train: bool = False,
    ) -> jax.Array:
        del level
        if isinstance(model.encoder, ViT):
            view = whole_view(images, self.augment, self.view_size)  # its positions are for one size
            return model.encoder(view, normalised=normalised).astype(jnp.float32)
        return model.encoder(whole_view(images, self.augment, None), train=train).astype(jnp.float32)

    def feature_map(self, model: EncoderProjector, images: jax.Array) -> jax.Array | None:
        if not isinstance(model.encoder, ViT):
            return None
        patches = model.encoder.patches(whole_view(images, self.augment, self.view_size)).astype(jnp.float32)
        return patches.reshape(len(images), model.encoder.grid, model.encoder.grid, -1)

    def pictures(self, model: EncoderProjector, images: jax.Array, key: jax.Array) -> None:
        return None

    def example_views(self, images: jax.Array, key: jax.Array) -> jax.Array:
        with jax.named_scope("augment"):
            return augment_views(key, images, self.augment, self.config.views)

    def _embed(self, model: EncoderProjector, view: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Features and their projection, both updating batch statistics."""
        with jax.named_scope("encoder"):
            features = model.encoder(view, train=True)
        with jax.named_scope("projector"):
            return features, model.projector(features, train=True)

    def _objective(self, z: jax.Array, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        config = self.config
        if config.loss == "vicreg":
            return vicreg_loss(
                z,
                invariance_weight=config.invariance_weight,
                std_weight=config.std_weight,
                cov_weight=config.cov_weight,
                covariance_normalisation=config.covariance_normalisation,
            )
        if config.loss == "infonce":
            return infonce_loss(z, temperature=config.temperature)
        # The key is a function of the step alone: every device draws the same slices.
        slices = random_slices(key, z.shape[-1], config.num_slices)
        return {"sigreg": sigreg_loss, "bcs": bcs_loss}[config.loss](z, slices, weight=config.sigreg_weight)
