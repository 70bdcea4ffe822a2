"""Image JEPA: augmented views of an image agree in embedding space, and a second term prevents collapse.

One encoder, one projector, no target network and no predictor. Losses: VICReg, SIGReg (LeJEPA), BCS (EB-JEPA), InfoNCE.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import Problem, key
from jepa_jax.losses.infonce import InfoNceKeys, infonce_loss
from jepa_jax.losses.sigreg import BcsKeys, SigregKeys, bcs_loss, random_slices, sigreg_loss
from jepa_jax.losses.vicreg import VicregKeys, vicreg_loss
from jepa_jax.methods.contract import Batch, Output, Terms
from jepa_jax.methods.image_method import EncoderWith, ImageMethod
from jepa_jax.models.heads import Projector

LOSSES = {"vicreg": VicregKeys, "sigreg": SigregKeys, "bcs": BcsKeys, "infonce": InfoNceKeys}


@dataclasses.dataclass(frozen=True)
class ImageJepaConfig(NamedGroup):
    views: int = key(2, "augmented views per image", least=2)
    per_view_statistics: bool = key(True, "whether batch norm sees one view at a time, or all views at once")
    projector: tuple[int, ...] = key((2048, 2048, 2048), "widths of the projector's layers", least=1)
    loss: str = key("vicreg", "what keeps embeddings from collapsing", variants=LOSSES)

    def problems(self, config: Config) -> Iterator[Problem]:
        if not self.projector:
            yield Problem("method.projector", "needs at least one width, e.g. (2048, 2048, 2048)")


class ImageJepa(ImageMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = ImageJepaConfig

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs = nnx.Rngs(params=key)
        encoder = self.encoder(sample, rngs)
        projector = Projector(encoder.feature_dim, self.config.projector, dtype=self.dtype, rngs=rngs)
        return EncoderWith(encoder, projector=projector)

    def loss(self, model: Any, target: None, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        del target, step
        view_key, slice_key = jax.random.split(key)
        views = self.example_views(batch, view_key)  # [V, B, h, w, C]
        if self.config.per_view_statistics:
            outputs = [self._embed(model, view) for view in views]
            features, z = outputs[0][0], jnp.stack([z for _, z in outputs])  # [V, B, D]
        else:
            # Images stay the outer axis, so that a batch split over devices stays where it is.
            together = jnp.swapaxes(views, 0, 1).reshape(-1, *views.shape[2:])  # [B V, h, w, C]
            features, z = self._embed(model, together)
            features = features[:: len(views)]
            z = jnp.swapaxes(z.reshape(-1, len(views), z.shape[-1]), 0, 1)
        with jax.named_scope("loss"):
            loss, terms = self._objective(z, slice_key)
        return Output(loss, terms, features)

    def example_views(self, batch: Batch, key: jax.Array) -> Float[Array, "v b h w c"]:
        return self.views(batch["image"], key, self.config.views)

    def _embed(self, model: Any, view: Float[Array, "b h w c"]) -> tuple[Float[Array, "b f"], Float[Array, "b d"]]:
        """Returns features for the online probe, and embeddings; both update batch statistics."""
        with jax.named_scope("encoder"):
            projected, features = self.encode(model.encoder, view)
        with jax.named_scope("projector"):
            return features, model.projector(projected, train=True)

    def _objective(self, z: Float[Array, "v b d"], key: jax.Array) -> tuple[Float[Array, ""], Terms]:
        config = self.config
        if config.loss == "vicreg":
            return vicreg_loss(
                z, **{field.name: getattr(config, field.name) for field in dataclasses.fields(VicregKeys)}
            )
        if config.loss == "infonce":
            return infonce_loss(z, temperature=config.temperature)
        # The key is equal on all devices, so that all draw the same slices.
        slices = random_slices(key, z.shape[-1], config.num_slices)
        return {"sigreg": sigreg_loss, "bcs": bcs_loss}[config.loss](z, slices, weight=config.sigreg_weight)
