"""A method: the spectral contrastive loss (HaoChen et al., "Provable Guarantees for Self-Supervised ...", 2021).

    export PYTHONPATH=docs/examples
    jepa-jax train --config=quickstart --config.method.name=spectral:Spectral --workdir=runs/spectral

Views of one image have a large product, those of different images a small one. Embeddings have one length r, so that
the loss lies between -2 r^2 and 2 r^2 + r^4.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from jepa_jax.config.groups import NamedGroup
from jepa_jax.config.schema import key
from jepa_jax.losses.cosine import unit
from jepa_jax.methods.contract import Output
from jepa_jax.methods.image_method import EncoderWith, ImageMethod
from jepa_jax.models.heads import Projector


@dataclasses.dataclass(frozen=True)
class SpectralKeys(NamedGroup):
    """Keys of the group `method`, each with default, meaning and limits."""

    num_views: ClassVar[int] = 2  # per image, which a loader may cut out of photographs

    projector: tuple[int, ...] = key((512, 128), "widths of the projector's layers", least=1, nonempty=True)
    radius: float = key(1.7, "length of the embeddings", least=1e-3)


class Spectral(ImageMethod):
    """Two views of each image; the products of all pairs of different images are negatives."""

    Keys = SpectralKeys

    def init(self, key, sample):
        rngs = nnx.Rngs(params=key)
        encoder = self.encoder(sample, rngs)  # the one that `model.name` names
        return EncoderWith(encoder, projector=Projector(encoder.feature_dim, self.config.projector, rngs=rngs))

    def loss(self, model, target, batch, key, step):
        views = self.batch_views(batch, key, 2)  # [2, B, h, w, C], augmented as `data.augment` says
        (features, first), (_, second) = [self.embed(model, view) for view in views]
        loss, terms = spectral_loss(*(self.config.radius * unit(z) for z in (first, second)))
        return Output(loss, terms, features)


def spectral_loss(first, second):
    """Returns -2 mean z_i z_i' + mean over i != j of (z_i z_j')^2, and both; over the global batch on any devices."""
    products = first @ second.T  # [B, B]
    own = jnp.diagonal(products)
    others = (jnp.sum(jnp.square(products)) - jnp.sum(jnp.square(own))) / (products.size - len(own))
    return others - 2 * jnp.mean(own), {"agreement": jnp.mean(own), "others": others}
