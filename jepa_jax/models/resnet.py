"""ResNet encoders with CIFAR and ImageNet stems, NHWC, global average pooling at the end."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.config.groups import Config, EncoderGroup
from jepa_jax.config.schema import Group, Problem, key
from jepa_jax.models.kernels import forward_mode
from jepa_jax.models.kernels.conv import conv2d, max_pool
from jepa_jax.models.kernels.norm import BatchNorm, BatchNormConfig
from jepa_jax.models.pooling import EncoderOutputs, pooled
from jepa_jax.models.remat import LIGHT, NONE, product, rematerialized

SIZES = {  # blocks in each of the four stages, and whether they are bottlenecks
    "resnet10": ((1, 1, 1, 1), False),
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
}
BOTTLENECK_EXPANSION = 4
LIGHT_BLOCKS = 2  # that light remat recomputes together: what goes from one to the next need not be kept
Map = Float[Array, "b h w c"]
OutputMap = Float[Array, "b p q d"]


@dataclasses.dataclass(frozen=True)
class CustomResNetKeys(Group):
    blocks: tuple[int, ...] = key((2, 2, 2, 2), "blocks of each stage", least=1, entry=int)
    widths: tuple[int, ...] = key(
        (),
        "channels inside the blocks of each stage; empty = model.width, doubled from stage to stage",
        least=1,
        entry=int,
    )
    bottleneck: bool = key(False, "whether blocks are 1x1 - 3x3 - 1x1 with four times as many outputs, or 3x3 - 3x3")

    def problems(self, config: Config) -> Iterator[Problem]:
        if not self.blocks or (self.widths and len(self.widths) != len(self.blocks)):
            yield Problem("model.widths", f"needs one number per stage of model.blocks = {self.blocks}, or none")


@dataclasses.dataclass(frozen=True)
class ResNetConfig(BatchNormConfig, EncoderGroup):
    name: str = key(
        "resnet18",
        "size of the encoder; resnet takes its own",
        variants={**dict.fromkeys(SIZES), "resnet": CustomResNetKeys},
    )
    stem: str = key("cifar", "first layer: 3x3 stride 1, or 7x7 stride 2 and max-pool", choices=("cifar", "imagenet"))
    width: int = key(64, "channels of the first layer and, unless model.widths differs, of the first stage", least=1)


class Conv(nnx.Module):
    """A convolution without bias: a norm follows."""

    def __init__(self, inputs: int, outputs: int, size: int, *, stride: int = 1, dtype: Any, rngs: nnx.Rngs):
        self.stride, self.padding, self.dtype = stride, size // 2, dtype
        kaiming = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        self.kernel = nnx.Param(kaiming(rngs.params(), (size, size, inputs, outputs)))

    def __call__(self, x: Map) -> OutputMap:
        kernel = self.kernel[...].astype(self.dtype)
        return conv2d(x.astype(self.dtype), kernel, stride=self.stride, padding=self.padding)


class ConvNorm(nnx.Module):
    """Convolution, batch norm and, unless told otherwise, ReLU."""

    def __init__(
        self, inputs: int, outputs: int, size: int, *, stride: int = 1, relu: bool = True, dtype: Any, rngs: nnx.Rngs
    ):
        self.conv = Conv(inputs, outputs, size, stride=stride, dtype=dtype, rngs=rngs)
        self.norm = BatchNorm(outputs, dtype=dtype, rngs=rngs)
        self.relu = relu

    def __call__(self, x: Map, train: bool) -> OutputMap:
        x = self.norm(self.conv(x), train=train)
        return jax.nn.relu(x) if self.relu else x


class ResidualBlock(nnx.Module):
    """Convolutions beside a shortcut: two of 3x3, or 1x1 - 3x3 - 1x1 for a bottleneck."""

    def __init__(self, inputs: int, width: int, *, stride: int, bottleneck: bool, dtype: Any, rngs: nnx.Rngs):
        outputs = width * BOTTLENECK_EXPANSION if bottleneck else width
        if bottleneck:
            layers = [(inputs, width, 1, 1, True), (width, width, 3, stride, True), (width, outputs, 1, 1, False)]
        else:
            layers = [(inputs, width, 3, stride, True), (width, width, 3, 1, False)]
        self.layers = nnx.List([
            ConvNorm(i, o, size, stride=s, relu=relu, dtype=dtype, rngs=rngs) for i, o, size, s, relu in layers
        ])  # fmt: skip
        project = stride != 1 or inputs != outputs
        self.shortcut = nnx.data(
            ConvNorm(inputs, outputs, 1, stride=stride, relu=False, dtype=dtype, rngs=rngs) if project else None
        )

    def __call__(self, x: Map, train: bool, kept: bool = True) -> OutputMap:
        """Returns the output, which light remat keeps if `kept`."""
        y = x
        for layer in self.layers:
            y = layer(y, train)
        y = y + (self.shortcut(x, train) if self.shortcut is not None else x)
        return jax.nn.relu(y) if forward_mode else kept_relu(y, kept)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def kept_relu(x: Map, kept: bool) -> Map:
    """Returns max(x, 0); the gradient reads the result, which the next block needs anyway, instead of x."""
    return _kept_relu_forward(x, kept)[0]


def _kept_relu_forward(x: Map, kept: bool) -> tuple[Map, Map]:
    y = jnp.maximum(x, 0)
    y = product(y) if kept else y
    return y, y


def _kept_relu_backward(kept: bool, y: Map, dy: Map) -> tuple[Map]:
    del kept
    return (jnp.where(y > 0, dy, 0),)


kept_relu.defvjp(_kept_relu_forward, _kept_relu_backward)


class ResNet(nnx.Module):
    """Maps images to the mean over the last feature map."""

    Keys = ResNetConfig
    pool, pools = "mean", ("mean", "grid2")

    def __init__(
        self,
        blocks: tuple[int, ...],
        *,
        bottleneck: bool,
        stem: str,
        width: int = 64,
        widths: tuple[int, ...] = (),
        channels: int = 3,
        dtype: Any = jnp.float32,
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        self.remat = remat
        self.imagenet_stem = stem == "imagenet"
        size, stride = (7, 2) if self.imagenet_stem else (3, 1)
        self.stem = ConvNorm(channels, width, size, stride=stride, dtype=dtype, rngs=rngs)
        expansion = BOTTLENECK_EXPANSION if bottleneck else 1
        self.blocks: nnx.List[ResidualBlock] = nnx.List([])
        inputs = width
        for stage, (count, planes) in enumerate(zip(blocks, widths or doubled(width, len(blocks)), strict=True)):
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                self.blocks.append(
                    ResidualBlock(inputs, planes, stride=stride, bottleneck=bottleneck, dtype=dtype, rngs=rngs)
                )
                inputs = planes * expansion
        self.feature_dim = inputs

    @classmethod
    def from_config(
        cls, config: Any, sample: Map, *, view_size: int, dtype: Any, remat: str, rngs: nnx.Rngs
    ) -> "ResNet":
        del view_size
        return cls(**cls.structure(config), channels=sample.shape[-1], dtype=dtype, remat=remat, rngs=rngs)

    @classmethod
    def structure(cls, config: Any) -> dict[str, Any]:
        custom = config.name not in SIZES
        blocks, bottleneck = (config.blocks, config.bottleneck) if custom else SIZES[config.name]
        widths = (custom and config.widths) or doubled(config.width, len(blocks))
        return {
            "blocks": blocks, "widths": widths, "bottleneck": bottleneck, "stem": config.stem, "width": config.width
        }  # fmt: skip

    def outputs(self, images: Map, *, train: bool = False, normalised: bool = True) -> EncoderOutputs:
        del normalised
        # The first convolution reads few channels: light remat computes it again instead of keeping its large result.
        stem_remat = LIGHT if self.remat == LIGHT else NONE
        x = rematerialized(lambda stem, x: stem(x, train), stem_remat, cheap_products=True)(self.stem, images)
        if self.imagenet_stem:
            x = max_pool(x, window=3, stride=2, padding=1)

        def apply(blocks: nnx.List[ResidualBlock], x: Map) -> OutputMap:
            for block in blocks[:-1]:
                x = block(x, train, kept=False)
            return blocks[-1](x, train)

        run = rematerialized(apply, self.remat)
        together = LIGHT_BLOCKS if self.remat == LIGHT else 1
        for start in range(0, len(self.blocks), together):
            x = run(nnx.List(self.blocks[start : start + together]), x)
        return EncoderOutputs(x)

    def __call__(self, images: Map, *, train: bool = False) -> Float[Array, "b f"]:
        return pooled(self.outputs(images, train=train), self.pool)


def doubled(width: int, stages: int) -> tuple[int, ...]:
    """Returns widths of stages, each twice that of the one before."""
    return tuple(width * 2**stage for stage in range(stages))
