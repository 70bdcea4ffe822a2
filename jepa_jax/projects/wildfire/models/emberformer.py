"""EmberFormer: a transformer over the history of each patch, a decoder over the map of patches, refinement to pixels.

A token is the sum of four embeddings: fire of the patch, wind, terrain of the patch, and time. Time counts backwards
from the last valid frame and padding is never attended to, so that a prediction does not depend on how far, or on
which side, a history is padded.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.config.schema import PROBABILITY, Group, Problem, key
from jepa_jax.models.kernels.linear import linear
from jepa_jax.models.kernels.mlp import gelu, mlp
from jepa_jax.models.kernels.norm import BatchNorm, BatchNormConfig, LayerNorm
from jepa_jax.models.remat import rematerialized
from jepa_jax.models.resnet import ConvNorm
from jepa_jax.models.tokens import patchify
from jepa_jax.projects.wildfire.models.segformer import (
    SIZES,
    MixTransformer,
    SegFormerHead,
    attend,
    dropped,
    make_dropout,
)
from jepa_jax.projects.wildfire.models.unet import Enlarge, UNet

LONGEST_PERIOD = 10_000.0  # of the time embedding, over 2 pi, in frames

Histories = Float[Array, "s t d"]
Map = Float[Array, "b rows columns d"]


@dataclasses.dataclass(frozen=True)
class SegFormerKeys(Group):
    decoder_size: str = key("b0", "size of the SegFormer", choices=tuple(SIZES))
    decoder_stride: int = key(1, "patches per side of a cell of its first stage; images have 4 pixels", least=1, most=4)
    decoder_drop_path: float = key(0.1, "share of maps that skip a branch of its last block in training", **PROBABILITY)
    decoder_dropout: float = key(0.1, "share of its features that are lost in training", least=0, most=0.99)
    decoder_weights: str = key(
        "",
        "directory as transformers saves it, or .safetensors file, of a SegFormer of this size to start from; "
        "empty = random weights",
    )


@dataclasses.dataclass(frozen=True)
class UNetKeys(Group):
    decoder_widths: tuple[int, ...] = key((32, 64, 128), "channels by scale, each half as fine as the last", least=1)

    def problems(self, config: Config) -> Iterator[Problem]:
        cells = config.data.image_size // config.model.patch_size
        if not self.decoder_widths:
            yield Problem("model.decoder_widths", "needs at least one width")
        elif cells >> len(self.decoder_widths) - 1 < 1:
            fix = "use fewer widths or a smaller model.patch_size"
            yield Problem("model.decoder_widths", f"{cells} patches per side cannot be halved that often; {fix}")


@dataclasses.dataclass(frozen=True)
class EmberFormerConfig(BatchNormConfig):
    patch_size: int = key(16, "pixels per side of a patch, a power of 2", least=1)
    width: int = key(64, "numbers per token", least=2)
    depth: int = key(3, "blocks of the temporal transformer", least=1)
    heads: int = key(4, "attention heads", least=1)
    mlp_width: int = key(256, "hidden numbers of a block's perceptron", least=1)
    norm: str = key("post", "layer norm after or before each branch of a block", choices=("post", "pre"))
    dropout: float = key(0.1, "share of numbers that branches of a block lose in training", least=0, most=0.99)
    fire_input: str = key(
        "fraction", "what a token knows of the fire: the burning share of its patch, or its pixels",
        choices=("fraction", "pixels"),
    )  # fmt: skip
    wind_input: str = key(
        "polar", "wind as speed and direction in [0, 1], which jumps at north, or as a vector",
        choices=("polar", "vector"),
    )  # fmt: skip
    decoder: str = key(
        "segformer", "what reads the map of patches", variants={"segformer": SegFormerKeys, "unet": UNetKeys}
    )
    refine_width: int = key(32, "channels of the refinement to pixels", least=1)
    refine_inputs: bool = key(False, "whether the refinement also reads the last mask and the terrain, pixel by pixel")

    def problems(self, config: Config) -> Iterator[Problem]:
        yield from super().problems(config)
        size, patch = config.data.image_size, self.patch_size
        if patch & (patch - 1) or size % patch:
            yield Problem("model.patch_size", f"must be a power of 2 that divides data.image_size = {size}")
        if self.width % self.heads or self.width % 2:
            yield Problem("model.width", f"must be even and a multiple of model.heads = {self.heads}")
        cells = -(-(size // patch) // getattr(self, "decoder_stride", 1))
        reduction = SIZES["b0"].reductions[0]  # of all sizes
        if self.decoder == "segformer" and cells < reduction:
            fix = "use a smaller patch_size, decoder_stride = 1, larger images or decoder = unet"
            yield Problem("model.patch_size", f"leaves {cells} of {reduction} cells that SegFormer needs; {fix}")


class TemporalBlock(nnx.Module):
    """Attention over the frames of each patch and a perceptron, with layer norms after ("post") or before branches."""

    def __init__(
        self, width: int, heads: int, mlp_width: int, *, norm: str, dropout: float, dtype: Any, rngs: nnx.Rngs
    ):
        self.heads, self.norm_first = heads, norm == "pre"
        self.norm1, self.norm2 = (LayerNorm(width, epsilon=1e-5, dtype=dtype, rngs=rngs) for _ in range(2))
        self.query = linear(width, width, dtype, rngs)
        self.key_value = linear(width, 2 * width, dtype, rngs)
        self.out = linear(width, width, dtype, rngs)
        self.up = linear(width, mlp_width, dtype, rngs)
        self.down = linear(mlp_width, width, dtype, rngs)
        self.drop = make_dropout(dropout, rngs)

    def __call__(
        self, x: Histories, queries: Float[Array, "s q d"], mask: Bool[Array, "s t"], *, train: bool
    ) -> Float[Array, "s q d"]:
        """Returns the outputs of `queries`, which are some frames of `x`; frames outside `mask` are not attended to."""
        if self.norm_first:
            queries = queries + dropped(self.drop, attend(self, self.norm1(queries), self.norm1(x), mask), train)
            return queries + self._mlp(self.norm2(queries), train)
        queries = self.norm1(queries + dropped(self.drop, attend(self, queries, x, mask), train))
        return self.norm2(queries + self._mlp(queries, train))

    def _mlp(self, x: Array, train: bool) -> Array:
        return dropped(self.drop, mlp(x, self.up, self.down, lambda hidden: dropped(self.drop, hidden, train)), train)


class HistoryEncoder(nnx.Module):
    """Maps histories to features of each patch at the last valid frame."""

    def __init__(self, config: Any, channels: int, *, dtype: Any, remat: str, rngs: nnx.Rngs):
        self.pixels, self.vector = config.fire_input == "pixels", config.wind_input == "vector"
        self.patch_size, self.width, self.remat, self.dtype = config.patch_size, config.width, remat, dtype
        self.fire = linear(config.patch_size**2 if self.pixels else 1, config.width, dtype, rngs)
        self.wind_in = linear(2, config.width // 2, dtype, rngs)
        self.wind_out = linear(config.width // 2, config.width, dtype, rngs)
        self.static = linear(channels, config.width, dtype, rngs)
        self.blocks = nnx.List([
            TemporalBlock(
                config.width, config.heads, config.mlp_width, norm=config.norm, dropout=config.dropout, dtype=dtype,
                rngs=rngs,
            )
            for _ in range(config.depth)
        ])  # fmt: skip

    def __call__(
        self,
        fire: Float[Array, "b t h w 1"],
        wind: Float[Array, "b t 2"],
        static: Float[Array, "b h w c"],
        valid: Bool[Array, "b t"],
        *,
        train: bool = False,
    ) -> Map:
        batch, frames, height, width, _ = fire.shape
        patches = (height // self.patch_size) * (width // self.patch_size)
        x = self.tokens(fire, wind, static, valid).reshape(batch * patches, frames, self.width)
        mask = jnp.repeat(valid, patches, axis=0)
        last = jnp.repeat(last_valid(valid), patches)[:, None, None]

        def run(block: TemporalBlock, x: Array, queries: Array) -> Array:
            return block(x, queries, mask, train=train)

        step = rematerialized(run, self.remat)
        for block in self.blocks[:-1]:
            x = step(block, x, x)
        # Only the last valid frame is read, so the last block computes nothing else.
        x = step(self.blocks[-1], x, jnp.take_along_axis(x, last, axis=1))
        return x.reshape(batch, height // self.patch_size, width // self.patch_size, self.width)

    def tokens(self, fire: Array, wind: Array, static: Array, valid: Array) -> Float[Array, "b n t d"]:
        """Returns fire + wind + terrain + time embeddings."""
        batch, frames = valid.shape
        masks = patchify(fire.reshape(batch * frames, *fire.shape[2:]), self.patch_size)
        masks = masks if self.pixels else jnp.mean(masks, axis=-1, keepdims=True)
        masks = masks.reshape(batch, frames, *masks.shape[1:]).swapaxes(1, 2)  # [B, N, T, pixels]
        if self.vector:
            angle = 2 * jnp.pi * wind[..., 1]
            wind = wind[..., :1] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)
        blown = self.wind_out(gelu(self.wind_in(wind)))  # [B, T, d]
        terrain = patchify(static, self.patch_size).reshape(batch, -1, self.patch_size**2, static.shape[-1])
        ground = self.static(jnp.mean(terrain, axis=2))  # [B, N, d]
        time = time_embedding(valid, self.width).astype(self.dtype)
        return self.fire(masks) + ground[:, :, None] + (blown + time)[:, None]


class SegFormerDecoder(nnx.Module):
    """SegFormer on the map of patches; returns features and a logit per cell of its first stage."""

    def __init__(self, inputs: int, config: Any, *, dtype: Any, remat: str, rngs: nnx.Rngs):
        size = SIZES[config.decoder_size]
        size = dataclasses.replace(size, strides=(config.decoder_stride, *size.strides[1:]))
        self.width = size.head_width
        self.encoder = MixTransformer(
            size, channels=inputs, drop_path=config.decoder_drop_path, dtype=dtype, remat=remat, rngs=rngs
        )
        self.head = SegFormerHead(size, classes=1, dropout=config.decoder_dropout, dtype=dtype, rngs=rngs)

    def __call__(self, x: Map, *, train: bool) -> tuple[Array, Array]:
        features = self.head.features(self.encoder(x, train=train), train=train)
        logits = self.head.classifier(features)
        return _resized(features, x), _resized(logits, x)


class UNetDecoder(nnx.Module):
    """U-Net on the map of patches; returns features and a logit per patch."""

    def __init__(self, inputs: int, config: Any, *, dtype: Any, remat: str, rngs: nnx.Rngs):
        del remat  # a few small maps
        self.width = config.decoder_widths[0]
        self.unet = UNet(inputs, config.decoder_widths, dtype=dtype, rngs=rngs)
        self.classifier = linear(self.width, 1, dtype, rngs)

    def __call__(self, x: Map, *, train: bool) -> tuple[Array, Array]:
        features = self.unet(x, train=train)
        return features, self.classifier(features)


class RefineStage(nnx.Module):
    """Doubles a map: transposed and 3 x 3 convolution, each with batch norm and ReLU."""

    def __init__(self, width: int, *, dtype: Any, rngs: nnx.Rngs):
        self.enlarge = Enlarge(width, width, dtype=dtype, rngs=rngs)
        self.norm = BatchNorm(width, dtype=dtype, rngs=rngs)
        self.smooth = ConvNorm(width, width, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x: Map, *, train: bool) -> Float[Array, "b h w d"]:
        return self.smooth(jax.nn.relu(self.norm(self.enlarge(x), train=train)), train)


class Refinement(nnx.Module):
    """Brings a map of patches to logits of pixels, which may read further maps of pixels."""

    def __init__(self, inputs: int, width: int, stages: int, pixel_maps: int, *, dtype: Any, rngs: nnx.Rngs):
        self.enter = linear(inputs, width, dtype, rngs)
        self.stages = nnx.List([RefineStage(width, dtype=dtype, rngs=rngs) for _ in range(stages)])
        self.mix = nnx.data(ConvNorm(width + pixel_maps, width, 3, dtype=dtype, rngs=rngs) if pixel_maps else None)
        self.leave = linear(width, 1, dtype, rngs)

    def __call__(self, x: Map, pixels: Float[Array, "b h w c"], *, train: bool) -> Float[Array, "b h w 1"]:
        x = self.enter(x)
        for stage in self.stages:
            x = stage(x, train=train)
        if self.mix is not None:
            x = self.mix(jnp.concatenate([x, pixels.astype(x.dtype)], axis=-1), train)
        return self.leave(x).astype(jnp.float32)


class EmberFormer(nnx.Module):
    """Maps histories of fires to logits of the next mask."""

    Keys = EmberFormerConfig

    def __init__(self, config: Any, channels: int, *, dtype: Any = jnp.float32, remat: str = "none", rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.history = HistoryEncoder(config, channels, remat=remat, **options)
        build = SegFormerDecoder if config.decoder == "segformer" else UNetDecoder
        self.decoder = build(config.width, config, remat=remat, **options)
        self.refinement = Refinement(
            config.width + self.decoder.width + 1,
            config.refine_width,
            stages=config.patch_size.bit_length() - 1,
            pixel_maps=1 + channels if config.refine_inputs else 0,
            **options,
        )

    @classmethod
    def from_config(
        cls, config: Any, sample: Any, *, view_size: int, dtype: Any, remat: str, rngs: nnx.Rngs
    ) -> "EmberFormer":
        """Refuses to be an image encoder; see `jepa_jax.models.registry.Encoder`."""
        raise UserError("config.model.name = emberformer: it reads histories of fires; use method.name = emberformer")

    def __call__(self, batch: Mapping[str, Array], *, train: bool = False) -> Float[Array, "b h w 1"]:
        """Returns logits in float32 for a batch as `jepa_jax.projects.wildfire.data.element.fire_spec` describes it."""
        fire, valid, static = batch["fire"].astype(jnp.float32), batch["valid"], batch["static"]
        with jax.named_scope("encoder"):
            x = self.history(fire, batch["wind"], static, valid, train=train)
        with jax.named_scope("predictor"):
            features, logits = self.decoder(x, train=train)
            newest = jnp.take_along_axis(fire, last_valid(valid)[:, None, None, None, None], axis=1)[:, 0]
            pixels = jnp.concatenate([newest, static], axis=-1)
            return self.refinement(jnp.concatenate([x, features, logits], axis=-1), pixels, train=train)


def last_valid(valid: Bool[Array, "b t"]) -> Integer[Array, " b"]:
    """Returns the index of the last valid frame of each history."""
    return valid.shape[1] - 1 - jnp.argmax(valid[:, ::-1], axis=1)


def time_embedding(valid: Bool[Array, "b t"], width: int) -> Float[Array, "b t d"]:
    """Returns sines and cosines of the number of frames between each frame and the last valid one."""
    frames = last_valid(valid)[:, None] - jnp.arange(valid.shape[1])
    frequencies = 1 / LONGEST_PERIOD ** (np.arange(width // 2) / (width // 2))
    angles = frames[..., None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _resized(x: Array, like: Array) -> Array:
    return jax.image.resize(x, (*like.shape[:3], x.shape[-1]), "bilinear") if x.shape[:3] != like.shape[:3] else x
