"""What the masked methods share: a ViT, one augmented view per image, and the grid of its patches."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import PROBABILITY, Group, Problem, key, subgroup
from jepa_jax.methods import schedules
from jepa_jax.methods.contract import Batch, Ema
from jepa_jax.methods.image_method import Features, ImageMethod
from jepa_jax.methods.masking import BlockMasks, MaskConfig, Masks, covers
from jepa_jax.models.kernels.attention import AUTO
from jepa_jax.models.pooling import EncoderOutputs
from jepa_jax.models.tokens import patchify, unpatchify
from jepa_jax.models.vit import BlockOptions, ViT, VitConfig

HIDDEN_PIXEL = 0.0  # of a normalised picture: the mean colour
View = Float[Array, "b h w c"]
Described = Float[Array, "b all numbers"]


@dataclasses.dataclass(frozen=True)
class EmaTargetKeys(Group):
    """Keys of `method.target = "ema"`."""

    ema_start: float = key(0.996, "momentum of the copy at the first step", **PROBABILITY)
    ema_end: float = key(1.0, "momentum of the copy at the last step, reached linearly", **PROBABILITY)


@dataclasses.dataclass(frozen=True)
class MaskedConfig(NamedGroup):
    """Base of the groups of masked methods."""

    num_views: ClassVar[int] = 1

    def problems(self, config: Config) -> Iterator[Problem]:
        if not isinstance(config.model, VitConfig):
            yield Problem("model.name", "this method drops patches before the encoder, which takes a ViT; use vit_tiny")


@dataclasses.dataclass(frozen=True)
class JepaConfig(MaskedConfig):
    """Keys that I-JEPA and H-JEPA share."""

    predictor_depth: int = key(6, "blocks of the predictor", least=1)
    predictor_heads: int = key(12, "attention heads of the predictor", least=1)
    target: str = key(
        "ema",
        "what is predicted: outputs of a slowly following copy (ema), of the encoder itself (online), or of the "
        "encoder and with its gradient (shared)",
        variants={"ema": EmaTargetKeys, "online": None, "shared": None},
    )
    mask: MaskConfig = subgroup(MaskConfig)
    masks_per_image: int = key(1, "masks that share one pass of the target encoder over an image", least=1)

    def problems(self, config: Config) -> Iterator[Problem]:
        if getattr(config.model, "pool", "mean") != "mean":
            yield Problem("model.pool", f"{config.method.name} learns patch features; use mean")
        if config.eval.pool == "cls":
            yield Problem("eval.pool", f"{config.method.name} trains no CLS output; use mean or grid2")


def width_problem(group: str, width: int, heads: int) -> Iterator[Problem]:
    """Yields a problem if a transformer of this width cannot have so many heads or sine-cosine positions."""
    if width % heads or width % 4:
        yield Problem(f"method.{group}_width", f"must be a multiple of 4 and of method.{group}_heads = {heads}")


class MaskedMethod(ImageMethod):
    """Base class of masked methods."""

    @property
    def patch_size(self) -> int:
        return self.run_config.model.patch_size

    @property
    def grid(self) -> int:
        """Patches per side of a view."""
        return self.view_size // self.patch_size

    def predictor_options(self, rngs: nnx.Rngs) -> dict[str, Any]:
        """Returns the arguments of `Predictor` that follow from the rest of the config."""
        options = BlockOptions(attention=getattr(self.run_config.model, "attention", AUTO))  # as in the encoder
        remat = self.run_config.train.remat
        return {"grid": self.grid, "options": options, "dtype": self.dtype, "remat": remat, "rngs": rngs}

    def view(self, batch: Batch, key: jax.Array, number: int = 0) -> View:
        """Returns one normalised view of each image; `number` counts those that a method takes."""
        return self.batch_views(batch, key, 1, first=number)[0]

    def shown(self, view: View, index: Integer[Array, "b ..."]) -> View:
        """Returns the view with only the patches at `index` visible."""
        visible = jnp.minimum(covers(index, self.grid**2), 1)[..., None]
        return unpatchify(jnp.where(visible > 0, patchify(view, self.patch_size), HIDDEN_PIXEL), self.patch_size)


class JepaMethod(MaskedMethod):
    """Base class of I-JEPA and H-JEPA: block masks, and the encoder outputs that are predicted."""

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        self.masks = BlockMasks(self.config.mask, self.grid)
        if self.config.target == "ema":
            momentum = schedules.linear(self.config.ema_start, self.config.ema_end, total_steps)
            self.ema = Ema(("encoder",), momentum)

    def sample_masks(self, key: jax.Array, view: View) -> Masks:
        """Returns `method.masks_per_image` masks of each image, those of an image one after the other: [B M, ...]."""
        return self.masks.sample(key, len(view) * self.config.masks_per_image)

    def first_masks(self, key: jax.Array, view: View) -> Masks:
        """Returns the first of the masks that `sample_masks` gives each image."""
        context, hidden, targets = (index[:: self.config.masks_per_image] for index in self.sample_masks(key, view))
        return Masks(context, hidden, targets)

    def context_patches(
        self, encoder: ViT, view: View, index: Integer[Array, "bm n"], described: Described | None = None
    ) -> Float[Array, "bm n d"]:
        """Returns outputs of the patches that each mask leaves visible, computed from these alone."""
        tokens = encoder.embed(view, index.reshape(len(view), -1), described)  # [B, M n, D]
        outputs = encoder.encode(tokens.reshape(*index.shape, -1), encoder.rotation(view, index), train=True)
        return outputs[:, encoder.num_leading :]

    def target_patches(
        self, model: Any, target: Any, view: View, described: Described | None = None
    ) -> Float[Array, "b n d"]:
        """Returns the patch outputs that are to be predicted, for `method.target`."""
        kind = self.config.target
        with jax.named_scope("target"):
            patches = (target if kind == "ema" else model).encoder.patches(view, described=described)
            return patches if kind == "shared" else jax.lax.stop_gradient(patches)

    def probe_features(self, goal: Float[Array, "b n d"]) -> Features | None:
        """Returns what the online probe reads of the predicted patches; None if other weights are evaluated.

        With `method.target = ema` and `eval.weights = online`, features would take another pass over whole images.
        """
        if (self.config.target == "ema") != (self.run_config.eval.weights == "target"):
            return None
        return self.pooled(EncoderOutputs(goal.reshape(len(goal), self.grid, self.grid, -1)))
