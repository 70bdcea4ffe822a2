"""A method: SimCLR (Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020).

    export PYTHONPATH=docs/examples
    jepa-jax train --config=quickstart --config.method.name=simclr:SimClr --workdir=runs/simclr

Each view must find the other view of its image among the 2 B - 1 other views of the batch. At random initial weights
and a high temperature, the loss is near log(2 B - 1).
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.config.groups import NamedGroup
from jepa_jax.config.schema import key
from jepa_jax.losses.cosine import unit
from jepa_jax.methods.contract import Output
from jepa_jax.methods.image_method import EncoderWith, ImageMethod
from jepa_jax.models.heads import Projector


@dataclasses.dataclass(frozen=True)
class SimClrKeys(NamedGroup):
    """Keys of the group `method`, each with default, meaning and limits."""

    num_views: ClassVar[int] = 2  # per image, which a loader may cut out of photographs

    projector: tuple[int, ...] = key((512, 128), "widths of the projector's layers", least=1, nonempty=True)
    temperature: float = key(0.5, "divisor of the cosine similarities", least=1e-3)


class SimClr(ImageMethod):
    """Contrasts two views of each image with all other views of the batch."""

    Keys = SimClrKeys

    def init(self, key, sample):
        rngs = nnx.Rngs(params=key)
        encoder = self.encoder(sample, rngs)  # the one that `model.name` names
        return EncoderWith(encoder, projector=Projector(encoder.feature_dim, self.config.projector, rngs=rngs))

    def loss(self, model, target, batch, key, step):
        views = self.batch_views(batch, key, 2)  # [2, B, h, w, C], augmented as `data.augment` says
        (features, first), (_, second) = [self.embed(model, view) for view in views]
        loss = nt_xent(jnp.concatenate([first, second]), self.config.temperature)
        return Output(loss, {"similarity": jnp.mean(jnp.sum(unit(first) * unit(second), axis=-1))}, features)


def nt_xent(z, temperature):
    """Returns the cross-entropy of finding the other view; z: [2 B, D], the global batch on any number of devices."""
    logits = unit(z) @ unit(z).T / temperature
    logits = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, logits)  # a view is not compared with itself
    wanted = jnp.roll(jnp.arange(len(z)), len(z) // 2)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), wanted[:, None], axis=1))
