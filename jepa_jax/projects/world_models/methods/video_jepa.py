"""`video_jepa`: latents of frames that keep their grid, and what follows two of them, learned together.

Predictions of K steps are compared with the latents of the true frames, which learn too: there is no slow copy and no
stopped gradient, and regularisers keep latents from collapsing. Reference: EB-JEPA (arXiv:2602.03604), video example.

A sequence is unrolled in one of two ways. `parallel`: all pairs of consecutive latents at once; the predictions are the
inputs of the next iteration, with the two true first latents in front, so that after iteration k the frames from 1 + k
on are k steps ahead. `autoregressive`: step by step from the two first latents alone.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import Group, Problem, key, subgroup
from jepa_jax.methods.contract import Batch, Terms
from jepa_jax.methods.whole_batch import Encoded, WholeBatchMethod
from jepa_jax.models.heads import Projector
from jepa_jax.models.pooling import EncoderOutputs, pooled
from jepa_jax.models.registry import DTYPES
from jepa_jax.models.rngs import init_rngs
from jepa_jax.projects.world_models import losses
from jepa_jax.projects.world_models.networks.maps import FrameEncoder, LatentUNet

Frames = UInt8[Array, "b t h w c"]
Latents = Float[Array, "b t h w d"]
CONTEXT = 2  # latents that a prediction reads


@dataclasses.dataclass(frozen=True)
class VideoLossConfig(Group):
    """Weights of the terms; a term of weight 0 is not computed."""

    prediction: float = key(1.0, "weight of the squared error of predicted latents", least=0)
    variance: float = key(10.0, "weight of the hinge on the standard deviation of latents", least=0)
    covariance: float = key(100.0, "weight of the squared covariances of latents", least=0)
    similarity: float = key(0.0, "weight of the squared difference of consecutive latents", least=0)
    sigreg: float = key(0.0, "weight of SIGReg of the latents of each time", least=0)
    slices: int = key(256, "random directions of SIGReg", least=1)

    def problems(self, config: Config) -> Iterator[Problem]:
        if not (self.variance or self.sigreg):
            yield Problem("method.loss.variance", "nothing keeps latents from collapsing; give it or sigreg a weight")


@dataclasses.dataclass(frozen=True)
class VideoJepaConfig(NamedGroup):
    reads_images: ClassVar[bool] = False

    stem_width: int = key(32, "channels of the first convolution", least=1)
    widths: tuple[int, ...] = key(
        (32, 64, 16), "channels of the encoder's blocks; the last are those of a latent", least=1
    )
    strides: tuple[int, ...] = key((1, 1, 1), "stride of each of these blocks", least=1, most=4)
    predictor_widths: tuple[int, ...] = key((32, 64, 128, 256), "channels of the U-Net, at halved resolutions", least=1)
    projector: tuple[int, ...] = key(
        (64, 64), "widths of the layers, per cell, between latents and the loss; empty = none", least=1
    )
    steps: int = key(4, "steps that predictions are unrolled", least=1)
    unroll: str = key(
        "parallel", "from all pairs at once, or from the first one step by step", choices=("parallel", "autoregressive")
    )
    loss: VideoLossConfig = subgroup(VideoLossConfig)

    def problems(self, config: Config) -> Iterator[Problem]:
        if len(self.strides) != len(self.widths):
            yield Problem("method.strides", f"needs one number for each of method.widths ({len(self.widths)})")
        part = math.prod(self.strides) * 2 ** (len(self.predictor_widths) - 1)
        if config.data.image_size % part:
            yield Problem(
                "data.image_size", f"strides and predictor halve it {part} times; use a multiple of {part}, or fewer"
            )
        if self.steps + CONTEXT > config.data.max_frames:
            yield Problem("method.steps", f"needs {CONTEXT} frames more than that, data.max_frames has fewer")
        if config.eval.pool == "cls":
            yield Problem("eval.pool", "video_jepa has no CLS token; use mean or grid2")


class VideoModel(nnx.Module):
    """Encoder, predictor and, if asked for, projector."""

    def __init__(self, config: Any, channels: int, *, dtype: Any, rngs: nnx.Rngs):
        latents = config.widths[-1]
        self.encoder = FrameEncoder(channels, config.stem_width, config.widths, config.strides, dtype=dtype, rngs=rngs)
        self.predictor = LatentUNet(latents, config.predictor_widths, dtype=dtype, rngs=rngs)
        self.projector = nnx.data(
            Projector(latents, config.projector, dtype=dtype, rngs=rngs) if config.projector else None
        )

    def encode(self, frames: Frames, *, train: bool = False) -> Latents:
        """Returns the latents of frames."""
        pixels = jnp.asarray(frames).reshape(-1, *frames.shape[2:]).astype(jnp.float32) / 255
        latents = self.encoder(pixels, train=train)
        return latents.reshape(*frames.shape[:2], *latents.shape[1:])

    def following(self, z: Latents, *, train: bool = False) -> Latents:
        """Returns what follows each pair of consecutive latents: [B, T - 1, h, w, D]."""
        before, last = (pair.reshape(-1, *z.shape[2:]) for pair in (z[:, :-1], z[:, 1:]))
        return self.predictor(before, last, train=train).reshape(len(z), -1, *z.shape[2:])

    def rollout(self, z: Latents, steps: int, *, train: bool = False) -> Latents:
        """Returns the `steps` latents that follow the last two of `z`, each predicted from those before it."""
        pair, predicted = z[:, -CONTEXT:], []
        for _ in range(steps):
            predicted.append(self.following(pair, train=train))
            pair = jnp.concatenate([pair[:, 1:], predicted[-1]], axis=1)
        return jnp.concatenate(predicted, axis=1)

    def projected(self, z: Latents, *, train: bool = False) -> Float[Array, "b t h w p"]:
        """Returns what the loss reads of latents, in float32."""
        if self.projector is None:
            return z.astype(jnp.float32)
        return self.projector(z.reshape(-1, z.shape[-1]), train=train).reshape(*z.shape[:-1], -1)


class VideoJepa(WholeBatchMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = VideoJepaConfig
    evaluators = ("regression", "collapse", "rollout")

    def init(self, key: jax.Array, sample: Batch) -> VideoModel:
        dtype, rngs = DTYPES[self.run_config.train.precision], init_rngs(key)
        return VideoModel(self.config, sample["frames"].shape[-1], dtype=dtype, rngs=rngs)

    def encode_batch(self, model: VideoModel, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Encoded:
        del target, key, step
        weights = self.config.loss
        with jax.named_scope("encoder"):
            z = model.encode(batch["frames"], train=True)
        with jax.named_scope("projector"):
            wanted = model.projected(z, train=True)
        makers = {
            "prediction": lambda: self._prediction_error(model, z, wanted),
            "similarity": lambda: losses.temporal_similarity(as_sequences(wanted)),
        }
        with jax.named_scope("loss"):
            loss, terms = losses.weighted(makers, weights)
        return Encoded(wanted, None, loss, terms)

    def batch_loss(
        self, model: Any, target: Any, embeddings: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Float[Array, ""], Terms]:
        del model, target, step
        with jax.named_scope("loss"):
            return losses.spread(as_sequences(embeddings), self.config.loss, key)

    def _prediction_error(self, model: VideoModel, z: Latents, wanted: Float[Array, "b t h w p"]) -> Float[Array, ""]:
        steps = self.config.steps
        with jax.named_scope("predictor"):
            if self.config.unroll == "autoregressive":
                predicted = model.projected(model.rollout(z[:, :CONTEXT], steps, train=True), train=True)
                return losses.squared_error(predicted, wanted[:, CONTEXT : CONTEXT + steps])
            inputs, error = z, jnp.zeros([])
            for _ in range(steps):
                predicted = model.following(inputs, train=True)[:, :-1]  # what follows the last pair has no target
                error += losses.squared_error(model.projected(predicted, train=True), wanted[:, CONTEXT:]) / steps
                inputs = jnp.concatenate([z[:, :CONTEXT], predicted], axis=1)
            return error

    def features(
        self, model: VideoModel, batch: Batch, *, level: int = 0, normalised: bool = True, train: bool = False
    ) -> Float[Array, "b f"]:
        """Returns the latents of all frames, their mean over time pooled as `eval.pool` says."""
        del level, normalised
        cells = jnp.mean(model.encode(batch["frames"], train=train).astype(jnp.float32), axis=1)
        return pooled(EncoderOutputs(cells), self.run_config.eval.pool)

    def encode(self, model: VideoModel, frames: Frames) -> Latents:
        """Returns the latents of frames."""
        return model.encode(frames)

    def rollout(self, model: VideoModel, latents: Latents, steps: int) -> Latents:
        """See `VideoModel.rollout`."""
        return model.rollout(latents, steps)


def as_sequences(cells: Float[Array, "b t h w d"]) -> Float[Array, "bhw t d"]:
    """Returns each cell of a map as a sequence of its own."""
    return jnp.moveaxis(cells, 1, 3).reshape(-1, cells.shape[1], cells.shape[-1])
