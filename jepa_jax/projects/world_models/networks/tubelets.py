"""Transformers over tubelets: blocks of some frames by some pixels, with fixed positions in time and space."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from jepa_jax.models.kernels.linear import linear
from jepa_jax.models.kernels.norm import LayerNorm
from jepa_jax.models.positions import sincos_positions
from jepa_jax.models.predictor import Predictor
from jepa_jax.models.tokens import patchify, take_tokens
from jepa_jax.models.vit import Block, BlockOptions, run_blocks

Videos = Float[Array, "b t h w c"]
Tokens = Float[Array, "b n d"]


def tubelets(videos: Videos, frames: int, size: int) -> Float[Array, "b n numbers"]:
    """Returns tubelets of `frames` frames and `size` x `size` pixels, those of the first frames first, row by row."""
    batch, length, height, width, channels = videos.shape
    joined = videos.reshape(batch * (length // frames), frames, height, width, channels)
    joined = jnp.moveaxis(joined, 1, 3).reshape(joined.shape[0], height, width, frames * channels)
    places = (length // frames) * (height // size) * (width // size)
    return patchify(joined, size).reshape(batch, places, size * size * frames * channels)


def tubelet_positions(times: int, grid: int, width: int) -> np.ndarray:
    """Returns positions [times * grid * grid, width]: about a third of the numbers for time, the others for space."""
    in_space = 4 * round(width / 6)
    in_time = width - in_space
    frequencies = 1 / 10_000 ** (np.arange((in_time + 1) // 2) / ((in_time + 1) // 2))
    angles = np.arange(times)[:, None] * frequencies
    time = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :in_time]
    space = sincos_positions(grid, in_space)
    together = np.repeat(time, len(space), axis=0), np.tile(space, (times, 1))
    return np.concatenate(together, axis=1).astype(np.float32)


class VideoViT(nnx.Module):
    """Maps videos to one output per tubelet."""

    def __init__(
        self,
        facts: dict[str, Any],
        *,
        frames: int,
        times: int,
        grid: int,
        channels: int,
        attention: str,
        dtype: Any,
        remat: str,
        rngs: nnx.Rngs,
    ):
        """Takes what `ViT.structure` says of sizes, and tubelets of `frames` frames on a `times` x grid x grid."""
        width = facts["width"]
        self.patch_size, self.frames, self.times, self.grid = facts["patch_size"], frames, times, grid
        self.feature_dim, self.remat = width, remat
        options = BlockOptions.of(facts, attention)
        self.patch_embed = linear(channels * frames * self.patch_size**2, width, dtype, rngs)
        sizes = (width, facts["heads"])
        self.blocks = nnx.List([Block(*sizes, options=options, dtype=dtype, rngs=rngs) for _ in range(facts["depth"])])
        self.norm = LayerNorm(width, epsilon=options.norm_eps, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        videos: Videos,
        keep: Integer[Array, "b n"] | None = None,
        *,
        train: bool = False,
        normalised: bool = True,
    ) -> Tokens:
        """Returns the outputs of all tubelets, or of those at `keep`, computed from these alone."""
        patches = tubelets(videos, self.frames, self.patch_size)
        places = jnp.asarray(tubelet_positions(self.times, self.grid, self.feature_dim))[None]
        if keep is not None:
            patches = take_tokens(patches, keep)
            places = take_tokens(jnp.broadcast_to(places, (len(videos), *places.shape[1:])), keep)
        tokens = self.patch_embed(patches)
        x = run_blocks(self.blocks, tokens + places.astype(tokens.dtype), remat=self.remat, train=train)
        return self.norm(x) if normalised else x


class TubeletPredictor(Predictor):
    """The predictor of I-JEPA at places in time and space."""

    def __init__(self, inputs: int, outputs: int, *, times: int, grid: int, **options: Any):
        super().__init__(inputs, outputs, grid=grid, **options)
        self.times = times

    def _positions(self) -> tuple[Float[Array, "1 1 d"], Float[Array, "1 places d"]]:
        places = tubelet_positions(self.times, self.grid, self.width)
        return jnp.zeros((1, 1, self.width)), jnp.asarray(places)[None]
