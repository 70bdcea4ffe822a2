"""An encoder: a small ConvNeXt (Liu et al., "A ConvNet for the 2020s", 2022).

    export PYTHONPATH=docs/examples
    jepa-jax train --config=quickstart --config.model.name=convnext:ConvNeXt --workdir=runs/convnext

Every method that takes an encoder trains it; probes, `evaluate`, plans and exported features read it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.config.groups import NamedGroup
from jepa_jax.config.schema import key
from jepa_jax.models.remat import rematerialized


@dataclasses.dataclass(frozen=True)
class ConvNeXtKeys(NamedGroup):
    patch_size: int = key(2, "pixels per side of a patch of the stem", least=1)
    width: int = key(48, "channels", least=1)
    depth: int = key(2, "blocks", least=1)


class Block(nnx.Module):
    """Depthwise 7x7 convolution, layer norm, and a perceptron of four times the width, beside a shortcut."""

    def __init__(self, width, dtype, rngs):
        self.depthwise = nnx.Conv(width, width, (7, 7), feature_group_count=width, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(self.depthwise(x)))))


class ConvNeXt(nnx.Module):
    """Maps normalised images [B, H, W, C] to features [B, width]: the mean over the last map, in float32."""

    Keys = ConvNeXtKeys

    def __init__(self, channels, config, dtype, remat, rngs):
        size = (config.patch_size, config.patch_size)
        self.stem = nnx.Conv(channels, config.width, size, strides=size, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config.width, dtype, rngs) for _ in range(config.depth)])
        self.feature_dim, self.remat = config.width, remat

    @classmethod
    def from_config(cls, config, sample, *, view_size, dtype, remat, rngs):
        return cls(sample.shape[-1], config, dtype, remat, rngs)

    def __call__(self, images, *, train=False):
        x, run = self.stem(images), rematerialized(lambda block, x: block(x), self.remat)
        for block in self.blocks:
            x = run(block, x)  # the backward pass recomputes what `train.remat` says
        return jnp.mean(x.astype(jnp.float32), axis=(1, 2))
