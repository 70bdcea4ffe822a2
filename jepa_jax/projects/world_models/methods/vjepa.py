"""`vjepa`: from the visible tubelets of a video, predict the features of hidden ones that a slow encoder sees.

Masks are the blocks of I-JEPA, the same ones in all frames: what is hidden cannot be copied from the frame before.
Each video gets one mask of each family (many small blocks, few large ones), as in V-JEPA 2 (arXiv:2506.09985): L1
distance to outputs that are normalised per token, EMA target.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, UInt8

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import PROBABILITY, Problem, key, subgroup
from jepa_jax.losses.jepa import standardised
from jepa_jax.methods import schedules
from jepa_jax.methods.contract import Batch, Ema, Method, Output
from jepa_jax.methods.image_method import EncoderWith
from jepa_jax.methods.masked import width_problem
from jepa_jax.methods.masking import BlockMasks, MaskConfig, Masks
from jepa_jax.models.pooling import EncoderOutputs, pooled
from jepa_jax.models.registry import DTYPES
from jepa_jax.models.rngs import init_rngs
from jepa_jax.models.tokens import take_tokens
from jepa_jax.models.vit import BlockOptions, ViT, VitConfig
from jepa_jax.projects.world_models.networks.tubelets import TubeletPredictor, VideoViT

Frames = UInt8[Array, "b t h w c"]


@dataclasses.dataclass(frozen=True)
class SmallBlocks(MaskConfig):
    """Many small blocks."""

    num_targets: int = key(8, "target blocks per frame", least=1)
    target_scale: tuple[float, ...] = key(
        (0.15, 0.15), "area of a target block, as a part of the frame", least=1e-6, most=1, length=2, increasing=True
    )
    context_scale: tuple[float, ...] = key(
        (1.0, 1.0), "area of the context block", least=1e-6, most=1, length=2, increasing=True
    )
    min_context: int = key(4, "patches of a frame that the encoder sees at least", least=1)


@dataclasses.dataclass(frozen=True)
class LargeBlocks(SmallBlocks):
    """Few large blocks."""

    num_targets: int = key(2, "target blocks per frame", least=1)
    target_scale: tuple[float, ...] = key(
        (0.7, 0.7), "area of a target block, as a part of the frame", least=1e-6, most=1, length=2, increasing=True
    )


@dataclasses.dataclass(frozen=True)
class VJepaConfig(NamedGroup):
    reads_images: ClassVar[bool] = False

    tubelet_frames: int = key(2, "frames of a tubelet", least=1)
    predictor_width: int = key(384, "numbers per token of the predictor", least=8)
    predictor_depth: int = key(12, "blocks of the predictor", least=1)
    predictor_heads: int = key(12, "attention heads of the predictor", least=1)
    ema_start: float = key(0.99925, "momentum of the slow encoder at the first step", **PROBABILITY)
    ema_end: float = key(0.99925, "momentum at the last step, reached linearly", **PROBABILITY)
    mean: tuple[float, ...] = key((), "mean of pixels in 0..1 by channel; empty = 0", entry=float)
    std: tuple[float, ...] = key((), "standard deviation by channel; empty = 1", least=1e-6, entry=float)
    small_blocks: SmallBlocks = subgroup(SmallBlocks)
    large_blocks: LargeBlocks = subgroup(LargeBlocks)

    def problems(self, config: Config) -> Iterator[Problem]:
        yield from width_problem("predictor", self.predictor_width, self.predictor_heads)
        if not isinstance(config.model, VitConfig):
            yield Problem("model.name", "vjepa takes the sizes of a ViT; use vit_tiny")
        elif config.data.image_size % config.model.patch_size:
            yield Problem("model.patch_size", f"does not divide data.image_size = {config.data.image_size}")
        if config.data.max_frames % self.tubelet_frames:
            yield Problem("data.max_frames", f"no multiple of method.tubelet_frames = {self.tubelet_frames}")
        if config.data.augment.crop.size not in (0, config.data.image_size):
            yield Problem("data.augment.crop.size", "videos are not cropped by the method; use 0")
        if config.eval.pool == "cls":
            yield Problem("eval.pool", "vjepa has no CLS token; use mean or grid2")


class VJepa(Method):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = VJepaConfig
    evaluators = ("regression", "collapse")

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        self.grid = config.data.image_size // config.model.patch_size
        self.times = config.data.max_frames // self.config.tubelet_frames
        families = (self.config.small_blocks, self.config.large_blocks)
        self.families = [BlockMasks(family, self.grid) for family in families]
        self.ema = Ema(("encoder",), schedules.linear(self.config.ema_start, self.config.ema_end, total_steps))

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs, config = init_rngs(key), self.config
        attention, channels = self.run_config.model.attention, sample["frames"].shape[-1]
        common: dict[str, Any] = {
            "times": self.times, "grid": self.grid, "dtype": DTYPES[self.run_config.train.precision],
            "remat": self.run_config.train.remat, "rngs": rngs,
        }  # fmt: skip
        facts = ViT.structure(self.run_config.model)
        encoder = VideoViT(facts, frames=config.tubelet_frames, channels=channels, attention=attention, **common)
        sizes = {name: getattr(config, f"predictor_{name}") for name in ("width", "depth", "heads")}
        options, width = BlockOptions(attention=attention), encoder.feature_dim
        predictor = TubeletPredictor(width, width, options=options, **sizes, **common)
        return EncoderWith(encoder, predictor=predictor)

    def normalised(self, frames: Frames) -> Float[Array, "b t h w c"]:
        """Returns frames as the encoder reads them."""
        mean, std = jnp.asarray(self.config.mean or 0.0), jnp.asarray(self.config.std or 1.0)
        return (jnp.asarray(frames).astype(jnp.float32) / 255 - mean) / std

    def in_all_frames(self, places: Integer[Array, "b n"]) -> Integer[Array, "b m"]:
        """Returns the places of tubelets whose patches are at `places` of a frame, at all times."""
        starts = self.grid**2 * jnp.arange(self.times)
        return (starts[:, None] + places[:, None]).reshape(len(places), -1)

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        del step
        videos = self.normalised(batch["frames"])
        with jax.named_scope("target"):
            goal = standardised(jax.lax.stop_gradient(target.encoder(videos)))
        terms = {
            name: self._distance(model, videos, goal, family.sample(own_key, len(videos)))
            for name, family, own_key in zip(
                ("small_blocks", "large_blocks"), self.families, jax.random.split(key), strict=True
            )
        }
        return Output(jnp.mean(jnp.stack(list(terms.values()))), terms)

    def _distance(
        self, model: Any, videos: Float[Array, "b t h w c"], goal: Float[Array, "b n d"], masks: Masks
    ) -> Float[Array, ""]:
        """Returns the mean L1 distance at the places that are hidden."""
        seen, hidden = self.in_all_frames(masks.context), self.in_all_frames(masks.targets.reshape(len(videos), -1))
        with jax.named_scope("encoder"):
            context = model.encoder(videos, seen, train=True)
        with jax.named_scope("predictor"):
            predicted = model.predictor(context, seen, hidden)
        return jnp.mean(jnp.abs(predicted.astype(jnp.float32) - take_tokens(goal, hidden)))

    def features(
        self, model: Any, batch: Batch, *, level: int = 0, normalised: bool = True, train: bool = False
    ) -> Float[Array, "b f"]:
        """Returns the outputs of all tubelets, their mean over time pooled as `eval.pool` says."""
        del level
        outputs = model.encoder(self.normalised(batch["frames"]), train=train, normalised=normalised)
        shape = (outputs.shape[0], self.times, self.grid, self.grid, outputs.shape[-1])
        cells = outputs.astype(jnp.float32).reshape(shape)
        return pooled(EncoderOutputs(jnp.mean(cells, axis=1)), self.run_config.eval.pool)
