"""Losses of binary masks: weighted cross-entropy, Dice, focal and Tversky, and mixes of them.

Only pixels that are `known` count. Means and ratios are taken over the known pixels of the whole batch, never of one
image: under `jit` with a sharded batch that is the global batch, however it is split over devices.

References: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017; Salehi et al., "Tversky loss function for
image segmentation using 3D fully convolutional deep networks", 2017.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jepa_jax.config.groups import Config
from jepa_jax.config.schema import Group, Problem, key

Scalar = Float[Array, ""]
Logits = Float[Array, "*mask"]
Mask = Bool[Array, "*mask"]

AUTO_WEIGHT_LIMIT = 100.0  # an automatic weight lies between this and its inverse
SMOOTHING = 1.0  # pixels added to both sides of a ratio of sums, which else is 0 / 0 without positives


@dataclasses.dataclass(frozen=True)
class MaskLossConfig(Group):
    """Weights and shapes of the terms of a mask's loss; a term of weight 0 is not computed."""

    bce: float = key(1.0, "weight of the weighted cross-entropy", least=0)
    dice: float = key(0.0, "weight of the Dice loss", least=0)
    focal: float = key(0.0, "weight of the focal loss", least=0)
    tversky: float = key(0.0, "weight of the Tversky loss", least=0)
    positive_weight: float = key(
        0.0,
        "how much a positive pixel counts in the cross-entropy; 0 = negative pixels per positive one of the batch, "
        f"at most {AUTO_WEIGHT_LIMIT:g}",
        least=0,
    )
    focal_alpha: float = key(0.25, "weight of positive pixels in the focal loss, 1 - alpha of others", least=0, most=1)
    focal_gamma: float = key(2.0, "how strongly the focal loss ignores pixels that are nearly right", least=0)
    tversky_fp: float = key(0.7, "weight of false positives in the Tversky loss", least=0)
    tversky_fn: float = key(0.3, "weight of false negatives in the Tversky loss", least=0)

    def problems(self, config: Config) -> Iterator[Problem]:
        if not (self.bce or self.dice or self.focal or self.tversky):
            yield Problem("method.loss.bce", "all terms of the loss have weight 0; give one of them a weight")


def mask_loss(logits: Logits, target: Mask, known: Mask, config: MaskLossConfig) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns the weighted sum of the terms whose weight is not 0, and these terms by name, without their weights."""
    pixels = (logits, target, known)
    makers = {
        "bce": lambda: weighted_bce(*pixels, config.positive_weight or None),
        "dice": lambda: tversky_loss(*pixels, fp=0.5, fn=0.5),
        "focal": lambda: focal_loss(*pixels, alpha=config.focal_alpha, gamma=config.focal_gamma),
        "tversky": lambda: tversky_loss(*pixels, fp=config.tversky_fp, fn=config.tversky_fn),
    }
    terms = {name: make() for name, make in makers.items() if getattr(config, name)}
    return sum((getattr(config, name) * term for name, term in terms.items()), jnp.zeros([])), terms


def weighted_bce(logits: Logits, target: Mask, known: Mask, positive_weight: float | None = None) -> Scalar:
    """Returns the mean over known pixels of the cross-entropy, with that of positive pixels times `positive_weight`.

    None stands for `auto_weight`. The mean divides by the number of pixels, not by the sum of their weights.
    """
    weight = auto_weight(target, known) if positive_weight is None else positive_weight
    error = -jax.nn.log_sigmoid(_signed(logits, target, known))
    return _mean(jnp.where(target, weight * error, error), known)


def auto_weight(target: Mask, known: Mask) -> Scalar:
    """Returns negatives / positives among the known pixels of the batch, within AUTO_WEIGHT_LIMIT and its inverse."""
    positives, negatives = jnp.sum(target & known), jnp.sum(~target & known)
    return jnp.clip(negatives / jnp.maximum(positives, 1), 1 / AUTO_WEIGHT_LIMIT, AUTO_WEIGHT_LIMIT)


def focal_loss(logits: Logits, target: Mask, known: Mask, *, alpha: float = 0.25, gamma: float = 2.0) -> Scalar:
    """Returns the mean over known pixels of -a (1 - p)^gamma log p.

    p is the probability of what is true, a is alpha for positive pixels and 1 - alpha for others.
    """
    signed = _signed(logits, target, known)
    # (1 - p)^gamma as an exponential: its gradient is finite for any gamma, also where p is 1.
    easy = jnp.exp(gamma * jax.nn.log_sigmoid(-signed))
    return _mean(-jnp.where(target, alpha, 1 - alpha) * easy * jax.nn.log_sigmoid(signed), known)


def tversky_loss(logits: Logits, target: Mask, known: Mask, *, fp: float = 0.7, fn: float = 0.3) -> Scalar:
    """Returns 1 - TP / (TP + fp FP + fn FN) with soft counts over the batch; SMOOTHING is added to both sides.

    With both weights 1/2 this is the Dice loss, 1 - 2 sum(p y) / (sum(p) + sum(y)).
    """
    p = jnp.where(known, jax.nn.sigmoid(jnp.where(known, logits.astype(jnp.float32), 0)), 0)
    hits = jnp.sum(jnp.where(target, p, 0))
    false_alarms = jnp.sum(jnp.where(target, 0, p))
    misses = jnp.sum(target & known) - hits
    return 1 - (hits + SMOOTHING) / (hits + fp * false_alarms + fn * misses + SMOOTHING)


def _signed(logits: Logits, target: Mask, known: Mask) -> Logits:
    """Returns the logit of what is true, in float32; 0 where nothing is known, so that no gradient comes from there."""
    logits = jnp.where(known, logits.astype(jnp.float32), 0)
    return jnp.where(target, logits, -logits)


def _mean(each: Logits, known: Mask) -> Scalar:
    return jnp.sum(jnp.where(known, each, 0)) / jnp.maximum(jnp.sum(known), 1)
