"""`world_model`: latents of frames, and what follows a latent under an action, learned together without rewards.

Two forms of the loss, by the weights of its terms. PLDM: prediction over several steps, variance, covariance, temporal
similarity and inverse dynamics (Sobal et al., "Learning from Reward-Free Offline Data", 2025). LeWM: prediction and
SIGReg alone (arXiv:2603.19312). There is no slow copy and no stopped gradient: targets learn too.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import PROBABILITY, Group, Problem, key, subgroup
from jepa_jax.methods.contract import Batch, ParamGroup, Terms
from jepa_jax.methods.whole_batch import Encoded, WholeBatchMethod
from jepa_jax.models.heads import Projector
from jepa_jax.models.kernels.linear import linear
from jepa_jax.models.kernels.norm import LayerNorm
from jepa_jax.models.registry import DTYPES, build_encoder
from jepa_jax.models.rngs import init_rngs
from jepa_jax.projects.world_models import losses
from jepa_jax.projects.world_models.control.config import ControlConfig
from jepa_jax.projects.world_models.networks.causal import CausalPredictor
from jepa_jax.projects.world_models.networks.recurrent import GruPredictor
from jepa_jax.projects.world_models.networks.residual import ResidualPredictor

Frames = UInt8[Array, "*b h w c"]
Latents = Float[Array, "b t d"]


@dataclasses.dataclass(frozen=True)
class WorldModelLossConfig(Group):
    """Weights of the terms; a term of weight 0 is not computed."""

    prediction: float = key(1.0, "weight of the squared error of predicted latents", least=0)
    variance: float = key(16.0, "weight of the hinge on the standard deviation of latents", least=0)
    covariance: float = key(8.0, "weight of the squared covariances of latents", least=0)
    similarity: float = key(12.0, "weight of the squared difference of consecutive latents", least=0)
    inverse_dynamics: float = key(
        1.0, "weight of the squared error of the action that is predicted from the latents before and after", least=0
    )
    sigreg: float = key(0.0, "weight of SIGReg of the latents of each time", least=0)
    slices: int = key(256, "random directions of SIGReg", least=1)

    def problems(self, config: Config) -> Iterator[Problem]:
        if not (self.variance or self.sigreg or self.inverse_dynamics):
            yield Problem(
                "method.loss.variance",
                "nothing keeps latents from collapsing; give it, sigreg or inverse_dynamics a weight",
            )


@dataclasses.dataclass(frozen=True)
class CausalKeys(Group):
    """Sizes of the causal transformer."""

    memory: int = key(3, "latents that a prediction sees", least=1)
    depth: int = key(6, "blocks", least=1)
    heads: int = key(16, "attention heads", least=1)
    head_width: int = key(64, "numbers of each head", least=1)
    mlp_width: int = key(2048, "numbers between the layers of the perceptron of each block", least=1)
    dropout: float = key(0.1, "share of the results of branches that are dropped in training", **PROBABILITY)


@dataclasses.dataclass(frozen=True)
class ResidualKeys(Group):
    predictor_hidden: tuple[int, ...] = key((256, 256), "numbers of each hidden layer", least=1, nonempty=True)


@dataclasses.dataclass(frozen=True)
class WorldModelConfig(NamedGroup):
    reads_images: ClassVar[bool] = False

    latent_width: int = key(512, "numbers of a latent", least=2)
    projector_width: int = key(
        0, "width of the hidden layer with batch norm before latents; 0 = one layer, then a layer norm", least=0
    )
    predictor: str = key(
        "gru", "what predicts the next latent", variants={"gru": None, "residual": ResidualKeys, "causal": CausalKeys}
    )
    unroll: int = key(8, "steps predicted from one latent; 0 = each latent from the true ones before it", least=0)
    starts: str = key(
        "first",
        "which latents these steps are predicted from: the first, or all that have as many frames after them",
        choices=("first", "all"),
    )
    clip_norm: float = key(
        0.0, "norm that gradients of encoder and predictor are clipped at, each by itself; 0 = optim.clip_norm", least=0
    )
    pixel_scaling: str = key(
        "full", "how pixels get to 0..1: by 255, or by least and most of each channel of each frame",
        choices=("full", "frame"),
    )  # fmt: skip
    pixel_mean: tuple[float, ...] = key((), "mean of scaled pixels by channel; empty = 0", entry=float)
    pixel_std: tuple[float, ...] = key((), "standard deviation by channel; empty = 1", least=1e-6, entry=float)
    loss: WorldModelLossConfig = subgroup(WorldModelLossConfig)
    control: ControlConfig = subgroup(ControlConfig)

    def problems(self, config: Config) -> Iterator[Problem]:
        for name in ("pixel_mean", "pixel_std"):
            if len(getattr(self, name)) not in (0, config.data.channels):
                yield Problem(
                    f"method.{name}", f"needs one number per channel (data.channels = {config.data.channels})"
                )
        if self.unroll >= config.data.max_frames:
            yield Problem("method.unroll", f"needs more frames than data.max_frames = {config.data.max_frames}")


class InverseDynamics(nnx.Module):
    """Predicts the action between two latents."""

    def __init__(self, latents: int, actions: int, *, width: int = 256, dtype: Any, rngs: nnx.Rngs):
        sizes = (2 * latents, width, width, actions)
        self.layers = nnx.List([linear(i, o, dtype, rngs) for i, o in itertools.pairwise(sizes)])

    def __call__(self, before: Latents, after: Latents) -> Float[Array, "b t a"]:
        x = jnp.concatenate([before, after], axis=-1)
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class LatentModel(nnx.Module):
    """Encodes frames, and predicts latents from latents and actions."""

    def __init__(self, encoder: Any, config: Any, actions: int, *, dtype: Any, rngs: nnx.Rngs):
        width, hidden = config.latent_width, config.projector_width
        self.encoder = encoder
        if config.predictor == "causal":
            sizes = {name: getattr(config, name) for name in vars(CausalKeys())}
            self.predictor: Any = CausalPredictor(width, actions, **sizes, dtype=dtype, rngs=rngs)
        elif config.predictor == "residual":
            hidden_width = config.predictor_hidden
            self.predictor = ResidualPredictor(width, actions, hidden=hidden_width, dtype=dtype, rngs=rngs)
        else:
            self.predictor = GruPredictor(width, actions, dtype=dtype, rngs=rngs)
        if hidden:
            self.head: Any = Projector(encoder.feature_dim, (hidden, width), dtype=dtype, rngs=rngs)
            self.after = Projector(width, (hidden, width), dtype=dtype, rngs=rngs)
        else:
            self.head = linear(encoder.feature_dim, width, dtype, rngs)
            self.norm = LayerNorm(width, dtype=jnp.float32, rngs=rngs)  # also of predictions
        if config.loss.inverse_dynamics:
            self.inverse = InverseDynamics(width, actions, dtype=dtype, rngs=rngs)
        self.projects = bool(hidden)

    def encode(self, images: Float[Array, "*b h w c"], *, train: bool = False) -> Float[Array, "*b d"]:
        """Returns the latents of scaled frames."""
        features = self.encoder(images.reshape(-1, *images.shape[-3:]), train=train)
        latents = self.head(features, train=train) if self.projects else self.norm(self.head(features))
        return latents.reshape(*images.shape[:-3], -1)

    def predict(self, latents: Latents, actions: Float[Array, "b t a"], *, train: bool = False) -> Latents:
        """Returns what follows each latent under its action, from at most the last `memory` latents."""
        following = self.predictor(latents, actions, train=train)
        return self.after(following, train=train) if self.projects else self.norm(following)

    def rollout(self, latents: Latents, actions: Float[Array, "b s a"], *, train: bool = False) -> Latents:
        """Returns the latents [B, K, D] that follow one by one, each predicted from those before it.

        Args:
          latents: [B, n, D], the known ones.
          actions: [B, n - 1 + K, A], from that of the first latent on.
        """
        memory, known = self.predictor.memory, latents.shape[1]
        growing = min(max(memory - known, 0), actions.shape[1] + 1 - known)
        for _ in range(growing):  # until there are as many as the predictor sees
            following = self.predict(latents, actions[:, : latents.shape[1]], train=train)[:, -1:]
            latents = jnp.concatenate([latents, following], axis=1)
        predicted = latents[:, known:]
        first = latents.shape[1] - min(memory, latents.shape[1])

        def step(window: Latents, seen: Float[Array, "b m a"]) -> tuple[Latents, Float[Array, "b d"]]:
            following = self.predict(window, seen, train=train)[:, -1]
            return jnp.concatenate([window[:, 1:], following[:, None]], axis=1), following

        left = actions.shape[1] + 1 - latents.shape[1]
        if left:
            windows = jnp.stack([actions[:, first + i : first + i + memory] for i in range(left)])
            rest = jax.lax.scan(step, latents[:, first:], windows)[1]
            predicted = jnp.concatenate([predicted, jnp.swapaxes(rest, 0, 1)], axis=1)
        return predicted


class WorldModel(WholeBatchMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = WorldModelConfig
    evaluators = ("predicted_states", "control_success", "collapse")
    loader = "jepa_jax.load_world_model"

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        if clip := self.config.clip_norm:
            heads = ("^encoder/|^head/|^norm/", "^predictor/|^after/" if self.config.projector_width else "^predictor/")
            self.param_groups = tuple(ParamGroup(pattern, clip=clip) for pattern in heads)

    def init(self, key: jax.Array, sample: Batch) -> LatentModel:
        config, rngs = self.run_config, init_rngs(key)
        frames = sample["frames"]
        encoder = build_encoder(config, self.scaled(frames.reshape(-1, *frames.shape[2:])), rngs)
        dtype = DTYPES[config.train.precision]
        return LatentModel(encoder, self.config, sample["actions"].shape[-1], dtype=dtype, rngs=rngs)

    def scaled(self, frames: Frames) -> Float[Array, "*b h w c"]:
        """Returns frames as the encoder reads them."""
        config = self.config
        pixels = jnp.asarray(frames).astype(jnp.float32)
        if config.pixel_scaling == "frame":
            low, high = (edge(pixels, axis=(-3, -2), keepdims=True) for edge in (jnp.min, jnp.max))
            pixels = (pixels - low) / jnp.maximum(high - low, 1)
        else:
            pixels = pixels / 255
        mean, std = jnp.asarray(config.pixel_mean or 0.0), jnp.asarray(config.pixel_std or 1.0)
        return (pixels - mean) / std

    def encode(self, model: LatentModel, frames: Frames) -> Float[Array, "*b d"]:
        """Returns the latents of frames."""
        return model.encode(self.scaled(frames))

    def rollout(self, model: LatentModel, latents: Latents, actions: Float[Array, "b s a"]) -> Latents:
        """See `LatentModel.rollout`."""
        return model.rollout(latents, actions)

    def features(
        self, model: LatentModel, batch: Batch, *, level: int = 0, normalised: bool = True, train: bool = False
    ) -> Float[Array, "b f"]:
        """Returns the latent of the first frame."""
        del level, normalised
        return model.encode(self.scaled(batch["frames"][:, 0]), train=train).astype(jnp.float32)

    def encode_batch(self, model: LatentModel, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Encoded:
        del target, key, step
        actions, weights = batch["actions"], self.config.loss
        with jax.named_scope("encoder"):
            z = model.encode(self.scaled(batch["frames"]), train=True)  # [B, T, D]
        makers = {
            "prediction": lambda: self._prediction_error(model, z, actions),
            "similarity": lambda: losses.temporal_similarity(z),
            "inverse_dynamics": lambda: losses.squared_error(model.inverse(z[:, :-1], z[:, 1:]), actions[:, :-1]),
        }
        with jax.named_scope("loss"):
            loss, terms = losses.weighted(makers, weights)
        return Encoded(z, None, loss, terms)

    def batch_loss(
        self, model: Any, target: Any, embeddings: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Float[Array, ""], Terms]:
        del model, target, step
        with jax.named_scope("loss"):
            return losses.spread(embeddings, self.config.loss, key)

    def _prediction_error(self, model: LatentModel, z: Latents, actions: Float[Array, "b t a"]) -> Float[Array, ""]:
        """Returns the error of unrolled latents, or of each from those before it."""
        steps = self.config.unroll
        with jax.named_scope("predictor"):
            if not steps:
                return losses.squared_error(model.predict(z[:, :-1], actions[:, :-1], train=True), z[:, 1:])
            starts = z.shape[1] - steps if self.config.starts == "all" else 1
            places = np.arange(starts)[:, None] + np.arange(steps)  # [starts, K]
            under, following = (x.reshape(-1, steps, x.shape[-1]) for x in (actions[:, places], z[:, places + 1]))
            predicted = model.rollout(z[:, :starts].reshape(-1, 1, z.shape[-1]), under, train=True)
        return losses.squared_error(predicted, following)
