"""I-JEPA: from the visible part of an image, predict the features of hidden blocks that a slow encoder sees.

Reference: Assran et al., "Self-Supervised Learning from Images with a Joint-Embedding Predictive Architecture", CVPR
2023. Hidden patches are dropped before the encoder. All target blocks are predicted in one pass: mask tokens carry no
content, so blocks learn nothing from one another, and the context is processed once instead of once per block.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jepa_jax.config.groups import Config
from jepa_jax.config.schema import Problem, key
from jepa_jax.losses.jepa import prediction_loss, standardised
from jepa_jax.methods.contract import Batch, Output
from jepa_jax.methods.image_method import EncoderWith
from jepa_jax.methods.masked import JepaConfig, JepaMethod, width_problem
from jepa_jax.models.predictor import Predictor
from jepa_jax.models.rngs import init_rngs
from jepa_jax.models.tokens import take_tokens


@dataclasses.dataclass(frozen=True)
class IJepaConfig(JepaConfig):
    predictor_width: int = key(384, "numbers per token of the predictor", least=4)

    def problems(self, config: Config) -> Iterator[Problem]:
        yield from width_problem("predictor", self.predictor_width, self.predictor_heads)


class IJepa(JepaMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = IJepaConfig

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs = init_rngs(key)
        encoder = self.encoder(sample, rngs)
        predictor = Predictor(
            encoder.feature_dim,
            encoder.feature_dim,
            width=self.config.predictor_width,
            depth=self.config.predictor_depth,
            heads=self.config.predictor_heads,
            **self.predictor_options(rngs),
        )
        return EncoderWith(encoder, predictor=predictor)

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        del step
        view_key, mask_key = jax.random.split(key)
        view = self.view(batch, view_key)
        masks = self.sample_masks(mask_key, view)
        wanted = masks.targets.reshape(len(masks.targets), -1)  # [B M, targets * target_tokens]

        described = model.encoder.describe(view)  # once for both encoders
        goal = self.target_patches(model, target, view, described)  # [B, tokens, D]
        with jax.named_scope("encoder"):
            context = self.context_patches(model.encoder, view, masks.context, described)
        with jax.named_scope("predictor"):
            predicted = model.predictor(context, masks.context, wanted)
        with jax.named_scope("loss"):
            goals = take_tokens(standardised(goal), wanted.reshape(len(view), -1))  # [B, M targets * target_tokens, D]
            loss = prediction_loss(predicted.reshape(goals.shape), goals)
        return Output(loss, {}, self.probe_features(goal))

    def example_views(self, batch: Batch, key: jax.Array) -> Float[Array, "v b h w c"]:
        """Returns the view, the visible context, and each of the target blocks."""
        view_key, mask_key = jax.random.split(key)
        view = self.view(batch, view_key)
        masks = self.first_masks(mask_key, view)
        targets = [self.shown(view, masks.targets[:, i]) for i in range(self.config.mask.num_targets)]
        return jnp.stack([view, self.shown(view, masks.context), *targets])
