"""Which patches a masked method sees and which it predicts: static counts, on the device, no favourite row or column.

Blocks have random areas and shapes, so their token counts vary. Instead of cutting every mask to the smallest one of a
batch in raster order, which throws away bottom rows and recompiles for every new count, the counts are fixed by the
configuration: a target is a random `target_tokens` of its block's patches (as many as the smallest block has), a
context a random `context_tokens` of the patches left over (as many as are left even if no two targets overlap).
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from jepa_jax.config.groups import Config
from jepa_jax.config.schema import Group, Problem, key

Draw = Float[Array, "..."]


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

    def problems(self, config: Config) -> Iterator[Problem]:
        view, patch = config.data.view_size, getattr(config.model, "patch_size", 0)
        if not patch or view % patch:
            return  # the encoder says so
        grid = view // patch
        masks = BlockMasks.of(self, grid)
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

    grid: int  # patches a side
    num_targets: int
    target_scale: tuple[float, ...]  # area of a target block, as a part of the image
    target_aspect: tuple[float, ...]  # height over width of a target block
    context_scale: tuple[float, ...]  # area of the context block
    min_context: int

    @classmethod
    def of(cls, config: MaskConfig, grid: int) -> "BlockMasks":
        """Returns the masks of a `method.mask` group."""
        low_high = (config.target_scale, config.target_aspect, config.context_scale)
        return cls(grid, config.num_targets, *low_high, config.min_context)

    @property
    def tokens(self) -> int:
        return self.grid**2

    @property
    def target_tokens(self) -> int:
        """Patches of the smallest block that can be drawn."""
        return min(height * width for height, width in self.smallest_blocks())

    @property
    def context_tokens(self) -> int:
        """What disjoint targets leave, less what the smallest context block would not cover of it."""
        return math.floor(self.context_scale[0] * (self.tokens - self.num_targets * self.target_tokens))

    def smallest_blocks(self) -> list[tuple[int, int]]:
        """For every height that can be drawn, the block of the smallest width."""
        smallest = self.target_scale[0] * self.tokens
        largest = self.target_scale[1] * self.tokens
        low, high = self.target_aspect
        blocks = []
        for height in range(1, self.grid + 1):
            # `height` is drawn when area * aspect lies between these; the smallest such area has the smallest width.
            least = 0.0 if height == 1 else (height - 0.5) ** 2
            most = math.inf if height == self.grid else (height + 0.5) ** 2
            area = max(smallest, least / high)
            if area <= largest and area * low <= most:
                blocks.append((height, max(1, min(self.grid, math.ceil(area / height - 0.5)))))
        return blocks

    def sample(self, key: jax.Array, batch: int) -> Masks:
        """Masks of a batch; those of an image depend on the key and its position alone."""
        draw = jax.random.uniform(key, (batch, self.num_targets + 1, 4))
        noise = jax.random.uniform(jax.random.fold_in(key, 1), (batch, self.num_targets + 1, self.tokens))

        blocks = self._target_blocks(draw[:, :-1])  # [B, N, tokens]
        targets = jax.lax.top_k(noise[:, :-1] + blocks, self.target_tokens)[1]  # a random part of each block
        predicted = jnp.any(jax.nn.one_hot(targets, self.tokens, dtype=bool, axis=-1), axis=(1, 2))  # [B, tokens]

        # In this order: free patches inside the context block, free ones outside it, patches of a block that are not
        # predicted; predicted ones never. Ties are broken at random.
        rank = 4 * ~predicted + 2 * ~jnp.any(blocks, axis=1) + self._context_block(draw[:, -1])
        order = jnp.argsort(-(rank + noise[:, -1]), axis=-1)
        return Masks(order[:, : self.context_tokens], order[:, self.context_tokens :], targets)

    def _target_blocks(self, draw: Float[Array, "... 4"]) -> Bool[Array, "... tokens"]:
        """Whether a patch is in a block, for uniform draws [..., 4] of area, aspect, top and left."""
        area = _between(draw[..., 0], *self.target_scale) * self.tokens
        aspect = jnp.exp(_between(draw[..., 1], *(math.log(bound) for bound in self.target_aspect)))
        height = jnp.clip(jnp.round(jnp.sqrt(area * aspect)), 1, self.grid)
        width = jnp.clip(jnp.round(area / height), 1, self.grid)
        return self._inside(height, width, draw[..., 2], draw[..., 3])

    def _context_block(self, draw: Float[Array, "... 4"]) -> Bool[Array, "... tokens"]:
        side = jnp.clip(jnp.round(jnp.sqrt(_between(draw[..., 0], *self.context_scale)) * self.grid), 1, self.grid)
        return self._inside(side, side, draw[..., 2], draw[..., 3])

    def _inside(self, height: Draw, width: Draw, down: Draw, right: Draw) -> Bool[Array, "... tokens"]:
        """[..., tokens] of blocks at random positions in the grid.

        Positions are drawn from one step beyond each border on and moved inside: patches at a border are in few of the
        possible blocks, and would be predicted too seldom if all positions were equally likely.
        """

        def start(draw: Draw, extent: Draw) -> Draw:
            return jnp.clip(jnp.floor(draw * (self.grid - extent + 3)) - 1, 0, self.grid - extent)[..., None]

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


def _between(draw: Draw, low: float, high: float) -> Draw:
    return low + draw * (high - low)
