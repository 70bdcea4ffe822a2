"""SimCLR: of all other views of a batch, find the one of the same image.

Reference: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020. The defaults
are the paper's for ResNet-50.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jepa_jax.config.schema import key
from jepa_jax.losses.nt_xent import nt_xent_loss
from jepa_jax.methods.contract import Terms
from jepa_jax.methods.image_method import ProjectorMethod, TwoViewConfig


@dataclasses.dataclass(frozen=True)
class SimClrConfig(TwoViewConfig):
    projector: tuple[int, ...] = key((2048, 128), "widths of the projector's layers", least=1, nonempty=True)
    temperature: float = key(0.1, "divisor of the cosine similarities", least=1e-3)


class SimClr(ProjectorMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = SimClrConfig

    def batch_loss(
        self, model: Any, target: Any, embeddings: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Float[Array, ""], Terms]:
        del target, key, step
        z = jnp.stack(self.project(model, embeddings))
        with jax.named_scope("loss"):
            return nt_xent_loss(z, temperature=self.config.temperature)
