"""PatchNet: whitened patches, then a few learned convolutions; an encoder that a CPU can train.

The stem's filters are the leading principal directions of training patches, scaled to equal variance. They are computed
from a sample of images, need no label and are not trained: gradients never pay for the largest maps of the network.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.config.groups import Config, EncoderGroup
from jepa_jax.config.schema import Problem, key
from jepa_jax.models.kernels.conv import conv2d, max_pool
from jepa_jax.models.kernels.norm import BatchNorm, BatchNormConfig
from jepa_jax.models.pooling import EncoderOutputs, pooled
from jepa_jax.models.resnet import ConvNorm
from jepa_jax.models.whitening import Fixed, whitening_filters


@dataclasses.dataclass(frozen=True)
class PatchNetConfig(BatchNormConfig, EncoderGroup):
    patch_size: int = key(6, "pixels per side of a whitened patch", least=2)
    stride: int = key(2, "pixels between two patches", least=1)
    stem_width: int = key(64, "whitening filters", least=1)
    widths: tuple[int, ...] = key(
        (96, 192, 512), "channels of the learned layers; the last one is 1x1", least=1, nonempty=True
    )
    all_layers: bool = key(False, "whether features are those of all learned layers side by side, or of the last one")

    def problems(self, config: Config) -> Iterator[Problem]:
        view = min(config.view_sizes)
        directions = config.data.channels * self.patch_size**2
        if not self.stride <= self.patch_size <= view:
            limits = f"model.stride = {self.stride} and the {view} pixels of a view"
            yield Problem("model.patch_size", f"must lie between {limits}")
        elif (view - self.patch_size) // self.stride < 1:
            yield Problem("model.patch_size", f"leaves one patch in {view} pixels; use a smaller one")
        if self.stem_width > directions:
            yield Problem("model.stem_width", f"a patch has {directions} principal directions; use at most that")
        if config.train.remat != "none":
            yield Problem("train.remat", "patchnet has nothing to recompute; use none")


class PatchNet(nnx.Module):
    """Maps images to features: stem, 3x3, pool, 3x3 ..., 1x1, mean over the last map or over the maps of all layers."""

    Keys = PatchNetConfig
    pool, pools = "mean", ("mean", "grid2")

    def __init__(
        self,
        sample: Float[Array, "n h w c"],
        *,
        patch_size: int,
        stride: int,
        stem_width: int,
        widths: Sequence[int],
        all_layers: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.stride, self.padding, self.dtype = stride, (patch_size - stride) // 2, dtype
        self.filters = Fixed(whitening_filters(sample, patch_size, stem_width))
        self.stem_norm = BatchNorm(stem_width, dtype=dtype, rngs=rngs)
        sizes = [stem_width, *widths]
        last = len(widths) - 1
        self.layers = nnx.List([
            ConvNorm(inputs, outputs, 1 if i == last else 3, dtype=dtype, rngs=rngs)
            for i, (inputs, outputs) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
        ])  # fmt: skip
        self.all_layers = all_layers
        self.feature_dim = sum(widths) if all_layers else widths[-1]

    @classmethod
    def from_config(
        cls, config: Any, sample: Float[Array, "n h w c"], *, view_size: int, dtype: Any, remat: str, rngs: nnx.Rngs
    ) -> "PatchNet":
        del view_size, remat
        return cls(
            sample, patch_size=config.patch_size, stride=config.stride, stem_width=config.stem_width,
            widths=config.widths, all_layers=config.all_layers, dtype=dtype, rngs=rngs,
        )  # fmt: skip

    def outputs(
        self, images: Float[Array, "b h w c"], *, train: bool = False, normalised: bool = True
    ) -> EncoderOutputs:
        del normalised
        filters = self.filters[...].astype(self.dtype)
        x = conv2d(images.astype(self.dtype), filters, stride=self.stride, padding=self.padding)
        x = jax.nn.relu(self.stem_norm(x, train=train))
        maps = []  # all of one size
        for i, layer in enumerate(self.layers):
            x = layer(x, train)
            if i == 0:
                x = max_pool(x, window=2, stride=2)
            maps.append(x)
        return EncoderOutputs(jnp.concatenate(maps, axis=-1) if self.all_layers else x)

    def __call__(self, images: Float[Array, "b h w c"], *, train: bool = False) -> Float[Array, "b f"]:
        return pooled(self.outputs(images, train=train), self.pool)
