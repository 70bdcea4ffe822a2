"""SegFormer: a Mix Transformer (MiT) that gives maps at four scales, and a head of linear layers that joins them.

Reference: Xie et al. 2021, arXiv:2105.15203. Maps are NHWC throughout. There are no positions: the depthwise
convolution of each block sees the border.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from jepa_jax.models.kernels.attention import attention
from jepa_jax.models.kernels.conv import conv2d
from jepa_jax.models.kernels.linear import linear
from jepa_jax.models.kernels.mlp import gelu
from jepa_jax.models.kernels.norm import BatchNorm, LayerNorm
from jepa_jax.models.remat import rematerialized

Map = Float[Array, "b h w c"]
OutputMap = Float[Array, "b p q d"]


@dataclasses.dataclass(frozen=True)
class SegFormerSize:
    """Sizes of all parts; tuples have one entry per stage."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    head_width: int
    heads: tuple[int, ...] = (1, 2, 5, 8)
    reductions: tuple[int, ...] = (8, 4, 2, 1)  # pixels per side that share one key and value
    mlp_ratios: tuple[int, ...] = (4, 4, 4, 4)
    patch_sizes: tuple[int, ...] = (7, 3, 3, 3)
    strides: tuple[int, ...] = (4, 2, 2, 2)


SIZES = {
    "b0": SegFormerSize((32, 64, 160, 256), (2, 2, 2, 2), 256),
    "b1": SegFormerSize((64, 128, 320, 512), (2, 2, 2, 2), 256),
    "b2": SegFormerSize((64, 128, 320, 512), (3, 4, 6, 3), 768),
}


class BiasedConv(nnx.Module):
    """A convolution with bias; depthwise if told so."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        *,
        stride: int = 1,
        padding: int,
        depthwise: bool = False,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.stride, self.padding, self.dtype = stride, padding, dtype
        shape = (size, size, 1 if depthwise else inputs, outputs)
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), shape))
        self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: Map) -> OutputMap:
        kernel = self.kernel[...].astype(self.dtype)
        y = conv2d(x.astype(self.dtype), kernel, stride=self.stride, padding=self.padding)
        return y + self.bias[...].astype(self.dtype)


class ReducedAttention(nnx.Module):
    """Self-attention in which `reduction` x `reduction` pixels share one key and value (spatial reduction)."""

    def __init__(self, width: int, heads: int, reduction: int, *, dtype: Any, rngs: nnx.Rngs):
        self.heads, self.reduction = heads, reduction
        self.query = linear(width, width, dtype, rngs)
        self.key_value = linear(width, 2 * width, dtype, rngs)
        self.out = linear(width, width, dtype, rngs)
        if reduction > 1:
            self.reduce = BiasedConv(width, width, reduction, stride=reduction, padding=0, dtype=dtype, rngs=rngs)
            self.reduce_norm = _layer_norm(width, dtype, rngs)

    def __call__(self, x: Map) -> Map:
        _, rows, columns, _ = x.shape
        if min(rows, columns) < self.reduction:
            raise ValueError(
                f"SegFormer: a map of {rows} x {columns} pixels cannot be reduced {self.reduction} x "
                f"{self.reduction}; use larger images"
            )
        reduced = self.reduce_norm(self.reduce(x)) if self.reduction > 1 else x
        return attend(self, x, reduced)


def attend(
    layers: Any, queries: Float[Array, "b ... d"], x: Float[Array, "b ... d"], mask: Bool[Array, "b t"] | None = None
) -> Float[Array, "b ... d"]:
    """Returns attention of `queries` to x, through the layers `query`, `key_value` and `out` of a module."""
    per_head = (len(x), -1, layers.heads, x.shape[-1] // layers.heads)
    q = layers.query(queries).reshape(per_head)
    k, v = (part.reshape(per_head) for part in jnp.split(layers.key_value(x), 2, axis=-1))
    return layers.out(attention(q, k, v, mask).reshape(queries.shape))


class MixBlock(nnx.Module):
    """x + attention(norm(x)), then x + Mix-FFN(norm(x)): a perceptron with a depthwise convolution between its layers.

    In training a share `drop_path` of the images skips each branch, as in `jepa_jax.models.vit.Block`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        reduction: int,
        mlp_ratio: int,
        drop_path: float = 0.0,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        hidden = mlp_ratio * width
        self.norm1 = _layer_norm(width, dtype, rngs)
        self.attention = ReducedAttention(width, heads, reduction, dtype=dtype, rngs=rngs)
        self.norm2 = _layer_norm(width, dtype, rngs)
        self.up = linear(width, hidden, dtype, rngs)
        self.depthwise = BiasedConv(hidden, hidden, 3, padding=1, depthwise=True, dtype=dtype, rngs=rngs)
        self.down = linear(hidden, width, dtype, rngs)
        self.drop = make_dropout(drop_path, rngs, broadcast_dims=(1, 2, 3))

    def __call__(self, x: Map, *, train: bool = False) -> Map:
        x = x + dropped(self.drop, self.attention(self.norm1(x)), train)
        hidden = gelu(self.depthwise(self.up(self.norm2(x))))
        return x + dropped(self.drop, self.down(hidden), train)


class Stage(nnx.Module):
    """Overlapping patch embedding, blocks, norm: one scale of the encoder."""

    def __init__(
        self,
        inputs: int,
        size: SegFormerSize,
        index: int,
        *,
        drop_paths: tuple[float, ...],
        dtype: Any,
        remat: str,
        rngs: nnx.Rngs,
    ):
        self.remat = remat
        width, patch = size.widths[index], size.patch_sizes[index]
        self.embed = BiasedConv(
            inputs, width, patch, stride=size.strides[index], padding=patch // 2, dtype=dtype, rngs=rngs
        )
        self.embed_norm = _layer_norm(width, dtype, rngs)
        self.blocks = nnx.List([
            MixBlock(
                width, size.heads[index], reduction=size.reductions[index], mlp_ratio=size.mlp_ratios[index],
                drop_path=rate, dtype=dtype, rngs=rngs,
            )
            for rate in drop_paths
        ])  # fmt: skip
        self.norm = _layer_norm(width, dtype, rngs)

    def __call__(self, x: Map, *, train: bool = False) -> OutputMap:
        run = rematerialized(lambda block, x: block(x, train=train), self.remat)
        x = self.embed_norm(self.embed(x))
        for block in self.blocks:
            x = run(block, x)
        return self.norm(x)


class MixTransformer(nnx.Module):
    """Maps images to one map per stage, at 1/4, 1/8, 1/16 and 1/32 of the image for the usual strides."""

    def __init__(
        self,
        size: SegFormerSize,
        *,
        channels: int = 3,
        drop_path: float = 0.0,
        dtype: Any = jnp.float32,
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        rates = np.split(np.linspace(0, drop_path, sum(size.depths)), np.cumsum(size.depths)[:-1])
        inputs = (channels, *size.widths[:-1])
        self.stages = nnx.List([
            Stage(inputs[i], size, i, drop_paths=tuple(map(float, rates[i])), dtype=dtype, remat=remat, rngs=rngs)
            for i in range(len(size.widths))
        ])  # fmt: skip

    def __call__(self, images: Map, *, train: bool = False) -> list[Array]:
        maps, x = [], images
        for stage in self.stages:
            x = stage(x, train=train)
            maps.append(x)
        return maps


class SegFormerHead(nnx.Module):
    """Joins the maps of all stages at the resolution of the first: linear layers, batch norm, ReLU, classifier.

    The published head enlarges every map, concatenates them, last stage first, and applies one linear layer, `fuse`.
    Enlarging commutes with a linear layer, so each map is multiplied by its rows of `fuse` at its own resolution and
    the products are enlarged and added: the same logits for a fraction of the work.
    """

    def __init__(
        self, size: SegFormerSize, *, classes: int, dropout: float = 0.0, dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        width, stages = size.head_width, len(size.widths)
        self.dtype = dtype
        self.project = nnx.List([linear(inputs, width, dtype, rngs) for inputs in size.widths])
        self.fuse = nnx.Param(nnx.initializers.xavier_uniform()(rngs.params(), (stages * width, width)))
        self.norm = BatchNorm(width, dtype=dtype, rngs=rngs)
        self.drop = make_dropout(dropout, rngs)
        self.classifier = linear(width, classes, dtype, rngs)

    def features(self, maps: list[Array], *, train: bool = False) -> OutputMap:
        """Returns what the classifier reads."""
        size = maps[0].shape[1:3]
        kernels = jnp.split(self.fuse[...].astype(self.dtype), len(maps))[::-1]  # [width, width] each
        products = (project(x) @ kernel for project, x, kernel in zip(self.project, maps, kernels, strict=True))
        x = sum(jax.image.resize(y, (len(y), *size, y.shape[-1]), "bilinear") for y in products)
        return dropped(self.drop, jax.nn.relu(self.norm(x, train=train)), train)

    def __call__(self, maps: list[Array], *, train: bool = False) -> OutputMap:
        return self.classifier(self.features(maps, train=train))


class SegFormer(nnx.Module):
    """Maps images to logits per pixel at the resolution of the first stage, a quarter of the image."""

    def __init__(
        self,
        size: SegFormerSize,
        *,
        classes: int,
        channels: int = 3,
        drop_path: float = 0.0,
        dropout: float = 0.0,
        dtype: Any = jnp.float32,
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        self.encoder = MixTransformer(size, channels=channels, drop_path=drop_path, dtype=dtype, remat=remat, rngs=rngs)
        self.head = SegFormerHead(size, classes=classes, dropout=dropout, dtype=dtype, rngs=rngs)

    def __call__(self, images: Map, *, train: bool = False) -> Float[Array, "b p q classes"]:
        return self.head(self.encoder(images, train=train), train=train)


def _layer_norm(width: int, dtype: Any, rngs: nnx.Rngs) -> LayerNorm:
    # The outputs of transformers are met with PyTorch's default epsilon, not with that of ViTs.
    return LayerNorm(width, epsilon=1e-5, dtype=dtype, rngs=rngs)


def make_dropout(rate: float, rngs: nnx.Rngs, broadcast_dims: tuple[int, ...] = ()) -> nnx.Dropout | None:
    """Returns a dropout layer with a random stream of its own, or None if nothing is dropped."""
    if not rate:
        return None
    return nnx.Dropout(rate, broadcast_dims=broadcast_dims, rngs=nnx.Rngs(dropout=rngs.params()))


def dropped(drop: nnx.Dropout | None, x: Array, train: bool) -> Array:
    return drop(x) if train and drop is not None else x
