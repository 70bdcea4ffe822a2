"""Which patches a masked method sees and which it predicts: static counts, on the device, no favourite row or column.

Blocks have random areas and shapes, so their token counts vary. Instead of cutting every mask to the smallest one of a
batch in raster order, which throws away bottom rows and recompiles for every new count, the counts are fixed by the
configuration: a target is a random `target_tokens` of its block's patches (as many as the smallest block has), a
context a random `context_tokens` of the patches that are in no block. Blocks are drawn again, or else put on top of the
first one, where together they would leave fewer.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from jepa_jax.config.groups import Config
from jepa_jax.config.schema import Group, Problem, key

Draw = Float[Array, "..."]
EVENNESS = 0.37  # how often the rarest patch is a target, compared with the commonest
TRIES = 4  # draws of a block, until one leaves enough context
AREAS_AND_ASPECTS = 64  # of each, for the probabilities of shapes


@dataclasses.dataclass(frozen=True)
class MaskConfig(Group):
    """Target blocks and context block, as in I-JEPA."""

    num_targets: int = key(4, "target blocks per image", least=1)
    target_scale: tuple[float, ...] = key(
        (0.15, 0.2), "area of a target block, as a part of the image", least=1e-6, most=1, length=2, increasing=True
    )
    target_aspect: tuple[float, ...] = key(
        (0.75, 1.5), "height over width of a target block", least=1e-6, length=2, increasing=True
    )
    context_scale: tuple[float, ...] = key(
        (0.85, 1.0), "area of the context block", least=1e-6, most=1, length=2, increasing=True
    )
    min_context: int = key(10, "patches that the encoder sees at least", least=1)
    context_tokens: int = key(
        0, "patches that the encoder sees; auto: as many as the targets leave on average", least=0, words={"auto": 0}
    )

    def problems(self, config: Config) -> Iterator[Problem]:
        view, patch = config.data.view_size, getattr(config.model, "patch_size", 0)
        if not patch or view % patch:
            return  # the encoder says so
        grid = view // patch
        masks = BlockMasks(self, grid)
        if masks.context_tokens > masks.most_context:
            yield Problem(
                "method.mask.context_tokens",
                f"these targets leave at most {masks.most_context} of a {grid} x {grid} grid as context",
            )
        if masks.context_tokens < self.min_context:
            yield Problem(
                "method.mask.min_context",
                f"{self.num_targets} targets of {masks.target_tokens} patches leave {masks.context_tokens} of a "
                f"{grid} x {grid} grid as context; use fewer or smaller targets, smaller patches or larger images",
            )


class Masks(NamedTuple):
    """Patch indices in raster order of the grid; within a list they are in random order."""

    context: Integer[Array, "b context"]  # what the encoder sees
    hidden: Integer[Array, "b hidden"]  # all the others
    targets: Integer[Array, "b targets n"]  # those of the others that are predicted


@dataclasses.dataclass(frozen=True)
class BlockMasks:
    """Several target blocks and one large context block without them, as in I-JEPA."""

    config: MaskConfig
    grid: int  # patches per side

    @property
    def tokens(self) -> int:
        return self.grid**2

    @functools.cached_property
    def shapes(self) -> dict[tuple[int, int], float]:
        """Height and width of the blocks that can be drawn, and their probabilities (area, log aspect: uniform)."""
        middles = (np.arange(AREAS_AND_ASPECTS) + 0.5) / AREAS_AND_ASPECTS
        area = np.interp(middles, (0, 1), self.config.target_scale)[:, None] * self.tokens
        aspect = np.exp(np.interp(middles, (0, 1), np.log(self.config.target_aspect)))
        height = np.clip(np.round(np.sqrt(area * aspect)), 1, self.grid).astype(int)
        width = np.clip(np.round(area / height), 1, self.grid).astype(int)
        pairs, counts = np.unique(np.stack([height, width], axis=-1).reshape(-1, 2), axis=0, return_counts=True)
        return {(int(h), int(w)): float(count) for (h, w), count in zip(pairs, counts / height.size, strict=True)}

    @functools.cached_property
    def target_tokens(self) -> int:
        """Patches of the smallest block."""
        return min(height * width for height, width in self.shapes)

    @property
    def context_tokens(self) -> int:
        return self.config.context_tokens or self.most_context

    @functools.cached_property
    def most_context(self) -> int:
        """What blocks leave on average, less what the smallest context block would not cover of it."""
        free = np.sum((1 - self._coverage(self.margin)) ** self.config.num_targets)
        largest = max(height * width for height, width in self.shapes)
        return min(math.floor(self.config.context_scale[0] * free), self.tokens - largest)

    @functools.cached_property
    def margin(self) -> int:
        """How far beyond a border block positions are drawn, before they are moved inside.

        Patches at a border are in few of the possible blocks. This is the smallest margin that makes the rarest patch
        a target `EVENNESS` as often as the commonest, or that comes nearest to it.
        """

        def evenness(margin: int) -> float:
            often = self._coverage(margin, part=self.target_tokens)
            return min(EVENNESS, float(often.min() / often.max()))

        return max(range(1, self.grid + 1), key=evenness)  # the first of those that are equal

    def _coverage(self, margin: int, part: int | None = None) -> np.ndarray:
        """Returns how likely a block covers each patch [grid, grid], or how likely the patch is one of `part` of it."""

        def axis(extent: int) -> np.ndarray:
            starts = np.clip(np.arange(-margin, self.grid - extent + 1 + margin), 0, self.grid - extent)
            at = np.arange(self.grid)
            return np.mean((at >= starts[:, None]) & (at < starts[:, None] + extent), axis=0)

        return np.sum(
            [
                likely * (part / (height * width) if part else 1) * np.outer(axis(height), axis(width))
                for (height, width), likely in self.shapes.items()
            ],
            axis=0,
        )

    def sample(self, key: jax.Array, batch: int) -> Masks:
        """Masks of a batch; those of an image depend on the key and its position alone."""
        target_key, noise_key, context_key = jax.random.split(key, 3)
        noise = jax.random.uniform(noise_key, (batch, self.config.num_targets + 1, self.tokens))
        draws = jax.random.uniform(target_key, (batch, self.config.num_targets, TRIES, 3))

        blocks = self._leaving_context(self._target_blocks(draws))  # [B, N, tokens]
        targets = jax.lax.top_k(noise[:, :-1] + blocks, self.target_tokens)[1]  # a random part of each block

        # In this order: free patches inside the context block, free ones outside it. At least `context_tokens` patches
        # are free, so none of a target block is seen. Ties are broken at random.
        context_block = self._context_block(jax.random.uniform(context_key, (batch, 3)))
        rank = 2 * ~jnp.any(blocks, axis=1) + context_block
        order = jnp.argsort(-(rank + noise[:, -1]), axis=-1)
        return Masks(order[:, : self.context_tokens], order[:, self.context_tokens :], targets)

    def _leaving_context(self, candidates: Bool[Array, "b n tries tokens"]) -> Bool[Array, "b n tokens"]:
        """Returns, for each target, the first candidate that leaves enough context, or else the first target again."""
        chosen = [candidates[:, 0, 0]]
        union = chosen[0]
        for i in range(1, self.config.num_targets):
            covered = jnp.sum(union[:, None] | candidates[:, i], axis=-1)  # [B, tries]
            fits = covered <= self.tokens - self.context_tokens
            first = jnp.argmax(fits, axis=-1)[:, None, None]
            candidate = jnp.take_along_axis(candidates[:, i], first, axis=1)[:, 0]
            chosen.append(jnp.where(jnp.any(fits, axis=-1, keepdims=True), candidate, chosen[0]))
            union = union | chosen[-1]
        return jnp.stack(chosen, axis=1)

    def _target_blocks(self, draw: Float[Array, "... 3"]) -> Bool[Array, "... tokens"]:
        """Whether a patch is in a block, for uniform draws of shape, top and left."""
        limits = np.cumsum(list(self.shapes.values()))[:-1]
        heights, widths = np.array(list(self.shapes), np.float32).T
        shape = jnp.sum(draw[..., :1] >= jnp.asarray(limits, jnp.float32), axis=-1)
        return self._inside(jnp.asarray(heights)[shape], jnp.asarray(widths)[shape], draw[..., 1], draw[..., 2])

    def _context_block(self, draw: Float[Array, "... 3"]) -> Bool[Array, "... tokens"]:
        low, high = self.config.context_scale
        area = low + draw[..., 0] * (high - low)
        side = jnp.clip(jnp.round(jnp.sqrt(area) * self.grid), 1, self.grid)
        return self._inside(side, side, draw[..., 1], draw[..., 2])

    def _inside(self, height: Draw, width: Draw, down: Draw, right: Draw) -> Bool[Array, "... tokens"]:
        """[..., tokens] of blocks at random positions in the grid; see `margin`."""

        def start(draw: Draw, extent: Draw) -> Draw:
            last = self.grid - extent
            return jnp.clip(jnp.floor(draw * (last + 1 + 2 * self.margin)) - self.margin, 0, last)[..., None]

        top, left = start(down, height), start(right, width)
        at = jnp.arange(self.grid)
        rows = (at >= top) & (at < top + height[..., None])
        columns = (at >= left) & (at < left + width[..., None])
        return (rows[..., :, None] & columns[..., None, :]).reshape(*height.shape, self.tokens)


def random_split(
    key: jax.Array, batch: int, tokens: int, kept: int
) -> tuple[Integer[Array, "b kept"], Integer[Array, "b rest"]]:
    """Returns a random `kept` of the patches of each image, and the others."""
    order = jnp.argsort(jax.random.uniform(key, (batch, tokens)), axis=-1)
    return order[:, :kept], order[:, kept:]


def covers(index: Integer[Array, "b ..."], tokens: int) -> Float[Array, "b tokens"]:
    """Returns how often each of `tokens` patches is in `index`."""
    flat = index.reshape(index.shape[0], -1)
    return jnp.sum(jax.nn.one_hot(flat, tokens), axis=1)
