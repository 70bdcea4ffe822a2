"""Hierarchical JEPA: hidden parts of an image are predicted at several scales at once.

Level l lives on the patch grid pooled by 2^l, so each of its cells is an area of the image. A level's target is the
standardised mean of the slow encoder's patches over that area, whether they are hidden or not; its prediction is a
head's reading of the predicted patches pooled over the same area. A cell counts as much as it is hidden. Features of a
level above 0 are its targets: heads are trained on predictor outputs only, so encoder features bypass them.

A second term keeps the features of images from collapsing: the visible patches of two views of the *same* image, each
with its own crop, colours and mask, agree in their mean feature, and those means fill the space (VICReg or SIGReg).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from jepa_jax.config.groups import Config
from jepa_jax.config.schema import Group, Problem, key
from jepa_jax.losses.jepa import prediction_loss, standardised
from jepa_jax.losses.sigreg import random_slices, sigreg_loss
from jepa_jax.losses.vicreg import vicreg_loss
from jepa_jax.methods.contract import Batch, Terms
from jepa_jax.methods.image_jepa import SigregKeys
from jepa_jax.methods.image_method import EncoderWith
from jepa_jax.methods.masked import Described, JepaConfig, JepaMethod, View
from jepa_jax.methods.masking import covers
from jepa_jax.methods.whole_batch import Encoded, WholeBatchMethod
from jepa_jax.models.kernels.linear import linear
from jepa_jax.models.kernels.norm import LayerNorm
from jepa_jax.models.pooling import EncoderOutputs, area_means
from jepa_jax.models.predictor import Predictor
from jepa_jax.models.rngs import init_rngs
from jepa_jax.models.tokens import take_tokens
from jepa_jax.models.vit import ViT

Tokens = Float[Array, "b n d"]
Maps = Float[Array, "_ _ d"]  # of a level: as many cells as it has, for each mask


@dataclasses.dataclass(frozen=True)
class RegulariserKeys(Group):
    regulariser_weight: float = key(0.1, "weight of the regulariser in the loss", least=0)


@dataclasses.dataclass(frozen=True)
class RegulariserSigregKeys(SigregKeys, RegulariserKeys):
    """SIGReg on image-level features."""


@dataclasses.dataclass(frozen=True)
class RegulariserVicregKeys(RegulariserKeys):
    invariance_weight: float = key(1.0, "weight of the agreement of two views", least=0)
    std_weight: float = key(1.0, "weight of the variance of each dimension", least=0)
    cov_weight: float = key(0.04, "weight of the covariance of dimensions, divided by D", least=0)


@dataclasses.dataclass(frozen=True)
class HJepaConfig(JepaConfig):
    token_dropping: bool = key(True, "whether the encoder never computes hidden patches; else they are zeros")
    level_weights: tuple[float, ...] = key((1.0, 0.5), "weight of each level's loss; as many levels, 2 to 4", least=0)
    fusion: str = key("none", "how coarse levels join finer ones, top down", choices=("none", "add", "concat"))
    regulariser: str = key(
        "vicreg",
        "what spreads image-level features",
        variants={"none": None, "vicreg": RegulariserVicregKeys, "sigreg": RegulariserSigregKeys},
    )

    @property
    def num_views(self) -> int:  # type: ignore[override]
        return 1 if self.regulariser == "none" else 2

    def problems(self, config: Config) -> Iterator[Problem]:
        if not 2 <= len(self.level_weights) <= 4:
            yield Problem("method.level_weights", "H-JEPA has 2 to 4 levels; give a weight for each")
        for name in ("crops", "image_size"):
            if getattr(config.eval, name):
                yield Problem(f"eval.{name}", "H-JEPA is evaluated at its levels, on views of one size; use 0")


class LevelHead(nnx.Module):
    """Linear, then layer norm: what one level makes of pooled patches."""

    def __init__(self, width: int, *, dtype: Any, rngs: nnx.Rngs):
        self.linear = linear(width, width, dtype, rngs)
        self.norm = LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Tokens) -> Tokens:
        return self.norm(self.linear(x))


class Hierarchy(nnx.Module):
    """Maps the patches of a whole grid to one map of cells per level, finest first.

    Fusion is that of a feature pyramid: from the coarsest level down, each joins what is above it, by sum or by a
    linear map of both.
    """

    def __init__(self, width: int, *, grid: int, levels: int, fusion: str, dtype: Any, rngs: nnx.Rngs):
        self.sides, self.fusion = tuple(level_side(grid, level) for level in range(levels)), fusion
        self.grid = grid
        self.heads = nnx.List([LevelHead(width, dtype=dtype, rngs=rngs) for _ in range(levels)])
        joins = levels - 1 if fusion == "concat" else 0
        self.joins = nnx.List([linear(2 * width, width, dtype, rngs) for _ in range(joins)])

    def __call__(self, patches: Tokens) -> list[Maps]:
        maps = [head(resample(patches, self.grid, side)) for side, head in zip(self.sides, self.heads, strict=True)]
        if self.fusion == "none":
            return maps
        for level in reversed(range(len(maps) - 1)):
            above = resample(maps[level + 1], self.sides[level + 1], self.sides[level])
            if self.fusion == "add":
                maps[level] = maps[level] + above
            else:
                maps[level] = self.joins[level](jnp.concatenate([maps[level], above], axis=-1))
        return maps


class HJepa(WholeBatchMethod, JepaMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = HJepaConfig
    evaluators = (*JepaMethod.evaluators, "context_and_target")

    @property
    def levels(self) -> int:  # type: ignore[override]
        return len(self.config.level_weights)

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs = init_rngs(key)
        encoder = self.encoder(sample, rngs)
        width = encoder.feature_dim
        predictor = Predictor(
            width,
            width,
            width=width,
            depth=self.config.predictor_depth,
            heads=self.config.predictor_heads,
            mark_context=True,
            **self.predictor_options(rngs),
        )
        options: Any = {"grid": self.grid, "levels": self.levels, "fusion": self.config.fusion}
        hierarchy = Hierarchy(width, **options, dtype=self.dtype, rngs=rngs)
        return EncoderWith(encoder, predictor=predictor, hierarchy=hierarchy)

    @property
    def compares_elements(self) -> bool:  # type: ignore[override]
        return self.config.regulariser != "none"

    def encode_batch(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Encoded:
        del step
        view_key, mask_key, second_key, _ = jax.random.split(key, 4)
        view = self.view(batch, view_key)
        masks = self.sample_masks(mask_key, view)
        described = model.encoder.describe(view)  # once for both encoders
        goal = self.target_patches(model, target, view, described)  # [B, tokens, D]
        with jax.named_scope("encoder"):
            context = self._context(model.encoder, view, masks.context, described)
        with jax.named_scope("predictor"):
            outputs = model.predictor(context, masks.context, masks.hidden, with_context=True)
            where = jnp.argsort(jnp.concatenate([masks.context, masks.hidden], axis=1), axis=1)
            predicted = model.hierarchy(take_tokens(outputs, where))
        with jax.named_scope("loss"):
            coverage = covers(masks.targets, self.grid**2)  # in how many target blocks a patch is
            loss, terms = jnp.zeros([]), {}
            for level, weight in enumerate(self.config.level_weights):
                cells = jnp.repeat(level_cells(goal, self.grid, level), self.config.masks_per_image, axis=0)
                hidden = resample(coverage[..., None], self.grid, level_side(self.grid, level))[..., 0]
                terms[f"level_{level}"] = prediction_loss(predicted[level], cells, hidden)
                loss += weight * terms[f"level_{level}"]
        contexts: tuple[jax.Array, ...] = ()
        if self.compares_elements:
            view_key, mask_key = jax.random.split(second_key)
            other = self.view(batch, view_key, number=1)
            with jax.named_scope("encoder"):
                second = self._context(model.encoder, other, self.masks.sample(mask_key, len(other)).context)
            contexts = (context[:: self.config.masks_per_image], second)
        pooled = tuple(jnp.mean(patches.astype(jnp.float32), axis=1) for patches in contexts)
        return Encoded(pooled, self.probe_features(goal), loss, terms)

    def batch_loss(
        self, model: Any, target: Any, embeddings: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Float[Array, ""], Terms]:
        del model, target, step
        if not self.compares_elements:
            return jnp.zeros([]), {}
        with jax.named_scope("loss"):
            loss, terms = self._regulariser(jnp.stack(embeddings), jax.random.split(key, 4)[3])
        return self.config.regulariser_weight * loss, terms

    def features(
        self, model: Any, batch: Batch, *, level: int = 0, normalised: bool = True, train: bool = False
    ) -> Float[Array, "b d"]:
        """Returns pooled cells of a level: the encoder's patches at level 0, the targets of the level's loss above.

        Without `normalised`, the encoder's patches, at any level.
        """
        if not (normalised and level):
            return super().features(model, batch, normalised=normalised, train=train)
        patches = model.encoder.patches(self.whole(batch["image"], self.view_size), train=train)
        side = level_side(self.grid, level)
        return self.pooled(
            EncoderOutputs(level_cells(patches, self.grid, level).reshape(patches.shape[0], side, side, -1))
        )

    def example_views(self, batch: Batch, key: jax.Array) -> Float[Array, "v b h w c"]:
        """Returns the view, the visible context, all targets, and the view as each coarser level sees it."""
        view_key, mask_key, _, _ = jax.random.split(key, 4)
        view = self.view(batch, view_key)
        masks = self.first_masks(mask_key, view)
        size = self.view_size
        flat = view.reshape(len(view), size * size, -1)
        coarse = []
        for level in range(1, self.levels):
            side = level_side(self.grid, level)
            cells = resample(resample(flat, size, side), side, size)
            coarse.append(cells.reshape(view.shape))
        return jnp.stack([view, self.shown(view, masks.context), self.shown(view, masks.targets), *coarse])

    def _context(
        self, encoder: ViT, view: View, index: Integer[Array, "bm context"], described: Described | None = None
    ) -> Float[Array, "bm context d"]:
        """Returns outputs of the visible patches, computed from them alone or with zeros for the hidden ones."""
        if self.config.token_dropping:
            return self.context_patches(encoder, view, index, described)
        visible = covers(index, self.grid**2)[..., None]
        tokens = jnp.repeat(encoder.embed(view, described=described), len(index) // len(view), axis=0)
        outputs = encoder.encode(tokens * visible.astype(tokens.dtype), encoder.rotation(view), train=True)
        return take_tokens(outputs[:, encoder.num_leading :], index)

    def _regulariser(self, z: Float[Array, "v b d"], key: jax.Array) -> tuple[Float[Array, ""], Terms]:
        config = self.config
        if config.regulariser == "sigreg":
            slices = random_slices(key, z.shape[-1], config.num_slices)
            return sigreg_loss(z, slices, weight=config.sigreg_weight)
        return vicreg_loss(
            z,
            invariance_weight=config.invariance_weight,
            std_weight=config.std_weight,
            cov_weight=config.cov_weight,
            covariance_normalisation="dimensions",
        )


def level_side(grid: int, level: int) -> int:
    """Returns the cells per side of a level: the grid over 2^level, rounded up."""
    return math.ceil(grid / 2**level)


def level_cells(patches: Tokens, grid: int, level: int) -> Float[Array, "b cells d"]:
    """Returns what a level is to predict of each of its cells: the mean of its patches, standardised."""
    return standardised(resample(patches.astype(jnp.float32), grid, level_side(grid, level)))


def resample(cells: Tokens, side: int, new_side: int) -> Float[Array, "b m d"]:
    """Returns square maps with another number of cells per side, each the mean over the area it covers."""
    square = cells.reshape(cells.shape[0], side, side, cells.shape[-1])
    return area_means(square, new_side).reshape(cells.shape[0], new_side**2, cells.shape[-1])
