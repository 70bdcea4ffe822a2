"""Image JEPA: augmented views of an image agree in embedding space, and a second term prevents collapse.

One encoder, one projector, no target network and no predictor. Losses: VICReg, SIGReg (LeJEPA), BCS (EB-JEPA), InfoNCE,
TCR (EMP-SSL), or a function of the user's own. Further groups of views have their own size, augmentation and role
(multi-crop).
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jepa_jax.base.classes import find_class
from jepa_jax.config.augment import FurtherViews, Operations
from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import Group, Problem, following, key
from jepa_jax.losses.infonce import infonce_loss
from jepa_jax.losses.roles import Roles
from jepa_jax.losses.sigreg import bcs_loss, random_slices, sigreg_loss
from jepa_jax.losses.tcr import tcr_loss
from jepa_jax.losses.vicreg import vicreg_loss
from jepa_jax.methods.contract import Batch, Terms
from jepa_jax.methods.image_method import ProjectorMethod
from jepa_jax.methods.whole_batch import Encoded


@dataclasses.dataclass(frozen=True)
class VicregKeys(Group):
    """Weights of the three terms of VICReg; the defaults are EB-JEPA's."""

    invariance_weight: float = key(1.0, "weight of the agreement of views", least=0)
    std_weight: float = key(1.0, "weight of the variance of each dimension", least=0)
    cov_weight: float = key(80.0, "weight of the covariance of dimensions", least=0)
    covariance_normalisation: str = key(
        "pairs", "what the sum of squared covariances is divided by: D (D - 1) or D", choices=("pairs", "dimensions")
    )


@dataclasses.dataclass(frozen=True)
class SigregKeys(Group):
    sigreg_weight: float = key(0.05, "lambda: weight of SIGReg, with 1 - lambda on invariance", least=0, most=1)
    num_slices: int = key(256, "random directions per step", least=1)


@dataclasses.dataclass(frozen=True)
class BcsKeys(Group):
    sigreg_weight: float = key(10.0, "factor of the Gaussian term", least=0)
    num_slices: int = key(256, "random directions per step", least=1)


@dataclasses.dataclass(frozen=True)
class InfoNceKeys(Group):
    temperature: float = key(0.2, "temperature of the similarities", least=1e-3)


@dataclasses.dataclass(frozen=True)
class TcrKeys(Group):
    similarity_weight: float = key(200.0, "weight of the cosine similarity to the mean view", least=0)
    distortion: float = key(0.2, "eps^2: squared error up to which embeddings are coded", least=1e-6)


LOSSES = {"vicreg": VicregKeys, "sigreg": SigregKeys, "bcs": BcsKeys, "infonce": InfoNceKeys, "tcr": TcrKeys}
WITHOUT_SLICES: dict[str, Callable[..., tuple[jax.Array, Terms]]] = {
    "vicreg": vicreg_loss,
    "infonce": infonce_loss,
    "tcr": tcr_loss,
}

Views = Float[Array, "_ b _ _ c"]  # any number, of any size


@dataclasses.dataclass(frozen=True)
class ImageJepaConfig(NamedGroup):
    views: int = key(2, "views per image that data.augment describes; each is predicted from the others", least=1)
    view_groups: tuple[str, ...] = key(
        (),
        "names of further groups of views, e.g. small; each has keys of its own",
        members=following(FurtherViews, Operations, "data.augment"),
    )
    per_view_statistics: bool = key(True, "whether batch norm sees one view at a time, or all views of a size at once")
    projector: tuple[int, ...] = key((2048, 2048, 2048), "widths of the projector's layers", least=1, nonempty=True)
    loss: str = key(
        "vicreg", "what keeps embeddings from collapsing; or package.module:function", variants=LOSSES, outside=True
    )

    @property
    def num_views(self) -> int:  # type: ignore[override]
        return self.views

    def problems(self, config: Config) -> Iterator[Problem]:
        wanted = self.views + sum(group.count for group in config.view_groups.values() if group.role != "context")
        if wanted < 2:
            yield Problem(
                "method.views", "leaves one view to agree with; use 2, or a group of views whose role is both"
            )


class ImageJepa(ProjectorMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = ImageJepaConfig

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        size, further = config.data.image_size, config.view_groups
        made = [(config.data.view_size, config.method.views * ["both"])]
        made += [(group.crop.size or size, group.count * [group.role]) for group in further.values()]
        made.sort(key=lambda group: config.view_sizes.index(group[0]))  # views of one size are encoded together
        roles = [role for _, several in made for role in several]
        context, target = (
            tuple(index for index, role in enumerate(roles) if role in (wanted, "both"))
            for wanted in ("context", "target")
        )
        self._roles = Roles(context, target) if further else Roles()

    def encode_batch(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Encoded:
        del target, step
        views = self._views(batch, jax.random.split(key)[0])
        if self.config.per_view_statistics:
            return self.encode_views(model.encoder, (view for one_size in views for view in one_size))
        return self._encode_together(model, views)

    def batch_loss(
        self, model: Any, target: Any, embeddings: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Float[Array, ""], Terms]:
        del target, step
        if self.config.per_view_statistics:
            z = jnp.stack(self.project(model, embeddings))  # [V, B, D]
        else:
            with jax.named_scope("projector"):
                projected = model.projector(embeddings.reshape(-1, embeddings.shape[-1]), train=True)
            z = jnp.swapaxes(projected.reshape(*embeddings.shape[:2], -1), 0, 1)
        with jax.named_scope("loss"):
            return self._objective(z, jax.random.split(key)[1])

    def _views(self, batch: Batch, key: jax.Array) -> list[Views]:
        """Returns the views of each size."""
        by_size: dict[int, list[jax.Array]] = {}
        for views in self.views_by_group(batch, key).values():
            by_size.setdefault(views.shape[2], []).append(views)
        return [jnp.concatenate(parts) for parts in by_size.values()]

    def _encode_together(self, model: Any, views: list[Views]) -> Encoded:
        """Returns what the projector reads of all views [B, V, F]; the encoder runs once per size.

        Images stay the outer axis, so that a batch split over devices stays where it is.
        """
        encoded, features = [], []
        with jax.named_scope("encoder"):
            for one_size in views:
                together = jnp.swapaxes(one_size, 0, 1).reshape(-1, *one_size.shape[2:])  # [B V, h, w, C]
                read_by_projector, read_by_probe = self.encode(model.encoder, together)
                encoded.append(read_by_projector.reshape(one_size.shape[1], len(one_size), -1))
                features.append(read_by_probe[:: len(one_size)])
        return Encoded(jnp.concatenate(encoded, axis=1), features[0])

    def _objective(self, z: Float[Array, "v b d"], key: jax.Array) -> tuple[Float[Array, ""], Terms]:
        """Returns the loss and its terms; the key is equal on all devices, so that all draw the same slices."""
        config = self.config
        if config.loss in ("sigreg", "bcs"):
            slices = random_slices(key, z.shape[-1], config.num_slices)
            loss = {"sigreg": sigreg_loss, "bcs": bcs_loss}[config.loss]
            return loss(z, slices, weight=config.sigreg_weight, roles=self._roles)
        own = find_class("method.loss", config.loss, {}) if ":" in config.loss else None
        keys = LOSSES[config.loss] if own is None else getattr(own, "Keys", Group)
        weights = {field.name: getattr(config, field.name) for field in dataclasses.fields(keys)}
        if own is not None:
            return own(z, key=key, roles=self._roles, **weights)
        return WITHOUT_SLICES[config.loss](z, roles=self._roles, **weights)
