"""Probes on the patches of a frozen encoder: attentive pooling for labels, a linear map for maps of classes.

Heads of several rates are trained side by side on the same tokens of unaugmented images, by AdamW with a cosine. Rate
and epoch are chosen on a held-out tenth of the training images; the test set is used once.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import MAP, Source, sample
from jepa_jax.data.subset import subset
from jepa_jax.evals.evaluators import EncoderEvaluator, Figures
from jepa_jax.evals.features import OnCount, accuracy_figures, held_out_split, ignore
from jepa_jax.evals.fine_tune import fitting_batch
from jepa_jax.evals.inference import FrozenEncoder
from jepa_jax.program.step import with_mesh
from jepa_jax.runtime.mesh import batch_sharding, whole_array

RATES = (3e-4, 1e-3, 3e-3)
EPOCHS = 10
WEIGHT_DECAY = 1e-2
STATISTICS_IMAGES = 1024  # of the train split, that tokens are standardised by
MOST_LOGITS = 2**24  # of a batch, which maps have many of
UNKNOWN = 255  # in a map: a pixel that does not count
MAPS = 256  # that are read at once
HEADS = 4  # of the attention, if they divide the features

Tokens = Float[Array, "b rows columns f"]
Head = Mapping[str, jax.Array]


class AttentiveProbe(EncoderEvaluator):
    """Accuracy of a linear classifier of what one learned query reads of the patches."""

    title = "attentive probe"
    reads, has_levels = "patches", False

    def measure(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        classes, (train, test) = len(encoder.train.classes), encoder.features(level)
        found, _, _ = token_probe(
            encoder, Task("label", classes, attentive_head, attentive_logits), accuracy,
            images=self.context.limits.fine_tune_images, start=start, on_step=self.context.progress.advance,
        )  # fmt: skip
        return accuracy_figures(found.pop("score"), train, test, classes) | found


class SegmentationProbe(EncoderEvaluator):
    """Mean intersection over union of a linear classifier of each patch, whose logits are resized to the maps."""

    title = "segmentation probe"
    needs, reads, has_levels = "maps", "patches", False

    def measure(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        del level
        images = self.context.limits.fine_tune_images
        used = sample(len(encoder.train), images)
        maps = (encoder.train.batch(used[i : i + MAPS])[MAP] for i in range(0, len(used), MAPS))
        classes = 1 + max(int(np.max(one, initial=0, where=one != UNKNOWN)) for one in maps)
        found, confusion, truth = token_probe(
            encoder, Task(MAP, classes, linear_head, map_logits, unknown=UNKNOWN), mean_iou,
            images=images, start=start, on_step=self.context.progress.advance,
        )  # fmt: skip
        commonest = np.zeros_like(confusion)
        commonest[:, np.argmax(truth)] = confusion.sum(axis=1)
        return {
            "miou": found.pop("score"),
            "pixel_accuracy": accuracy(confusion),
            "chance": mean_iou(commonest),  # of the commonest class everywhere
            "classes": classes,
            **found,
        }

    def in_words(self, figures: Figures) -> str:
        untrained = f", untrained {figures['untrained']['miou']:.1f} %" if "untrained" in figures else ""
        return f"mIoU {figures['miou']:.1f} %{untrained}, commonest class {figures['chance']:.1f} %"


class Task(NamedTuple):
    """What a head predicts, and how."""

    target: str  # array of a batch: [B] or [B, H, W], numbers of classes
    classes: int
    init: Callable[[jax.Array, int, int], Head]  # key, features, classes
    logits: Callable[[Head, Tokens, tuple[int, ...]], jax.Array]  # [B, ..., classes], of the target's shape
    unknown: int = -1  # number that does not count


def linear_head(key: jax.Array, features: int, classes: int) -> Head:
    del key
    return {"kernel": jnp.zeros((features, classes)), "bias": jnp.zeros(classes)}


def map_logits(head: Head, tokens: Tokens, shape: tuple[int, ...]) -> Float[Array, "b h w classes"]:
    logits = tokens @ head["kernel"] + head["bias"]
    return jax.image.resize(logits, (*shape, logits.shape[-1]), "linear")


def attentive_head(key: jax.Array, features: int, classes: int) -> Head:
    normal = jax.random.normal(key, (2, features, features)) / features**0.5
    query = jnp.zeros(features)  # begins as the mean over patches
    return {"query": query, "keys": normal[0], "values": normal[1]} | dict(linear_head(key, features, classes))


def attentive_logits(head: Head, tokens: Tokens, shape: tuple[int, ...]) -> Float[Array, "b classes"]:
    del shape
    features = tokens.shape[-1]
    heads = HEADS if features % HEADS == 0 else 1

    def by_head(x: jax.Array) -> jax.Array:
        return x.reshape(len(tokens), -1, heads, features // heads)

    keys, values = (by_head(tokens @ head[name]) for name in ("keys", "values"))
    scores = jnp.einsum("bnhd,hd->bhn", keys, head["query"].reshape(heads, -1)) / (features // heads) ** 0.5
    read = jnp.einsum("bhn,bnhd->bhd", jax.nn.softmax(scores), values).reshape(len(tokens), features)
    return read @ head["kernel"] + head["bias"]


def token_probe(
    encoder: FrozenEncoder,
    task: Task,
    score: Callable[[np.ndarray], float],
    *,
    images: int = 0,
    start: OnCount = ignore,
    on_step: OnCount = ignore,
) -> tuple[Figures, np.ndarray, np.ndarray]:
    """Trains heads on the tokens of at most `images` train images, and scores the chosen one on the test split.

    Returns:
      Figures: `score` in percent, and with which rate and after which epoch, chosen by `held_out_score`.
      Counts [true, predicted] of the test split.
      Counts of the classes in the held-out part of the train split.
    """
    train = subset(encoder.train, sample(len(encoder.train), images))
    fit_part, score_part = held_out_split(len(train))
    held_out = subset(train, score_part)
    mesh = encoder.program.mesh
    logits = task.classes * int(np.prod(train.spec[task.target].shape, dtype=int))
    size = min(fitting_batch(len(fit_part), mesh.size), max(mesh.size, MOST_LOGITS // logits // mesh.size * mesh.size))
    steps = len(fit_part) // size
    start(EPOCHS * steps)
    standard = token_statistics(encoder, train)

    def tokens(params: Any, stats: Any, batch: Any) -> Tokens:
        return (encoder.tokens(params, stats, batch) - standard[0]) * standard[1]

    heads = jax.vmap(lambda key: task.init(key, len(standard[0]), task.classes))(
        jnp.repeat(jax.random.key(0)[None], len(RATES))
    )
    tx = optax.chain(
        optax.scale_by_adam(), optax.add_decayed_weights(WEIGHT_DECAY),
        optax.scale_by_schedule(optax.cosine_decay_schedule(-1.0, EPOCHS * steps)),
    )  # fmt: skip
    state = tx.init(heads)

    def loss(head: Head, x: Tokens, target: jax.Array) -> jax.Array:
        known = target != task.unknown
        found = task.logits(head, x, target.shape)
        each = optax.softmax_cross_entropy_with_integer_labels(found, jnp.where(known, target, 0).astype(jnp.int32))
        return jnp.sum(each * known) / jnp.maximum(jnp.sum(known), 1)

    def step(heads: Head, state: Any, params: Any, stats: Any, batch: Any) -> tuple[Head, Any]:
        x = tokens(params, stats, batch)
        grads = jax.grad(lambda heads: jnp.sum(jax.vmap(loss, (0, None, None))(heads, x, batch[task.target])))(heads)
        updates, state = tx.update(grads, state, heads)  # elementwise: each head has its own
        rates = jnp.array(RATES)
        return jax.tree.map(lambda h, u: h + u * rates.reshape(-1, *[1] * (h.ndim - 1)), heads, updates), state

    def predictions(heads: Head, params: Any, stats: Any, batch: Any) -> jax.Array:
        x, shape = tokens(params, stats, batch), batch[task.target].shape
        return jnp.stack([
            jnp.argmax(task.logits(jax.tree.map(lambda leaf, i=i: leaf[i], heads), x, shape), axis=-1)
            for i in range(len(heads["bias"]))
        ], axis=1)  # fmt: skip

    step, predict = jax.jit(with_mesh(mesh, step)), jax.jit(with_mesh(mesh, predictions))

    def confusions(heads: Head, source: Source) -> np.ndarray:
        """Returns counts [heads, true, predicted]."""
        total = np.zeros((len(heads["bias"]), task.classes, task.classes), int)
        function = lambda *model_and_batch: predict(heads, *model_and_batch)  # noqa: E731
        for predicted, batch, valid in encoder.outputs(function, source):
            truth = whole_array(batch[task.target])[:valid]
            if np.any(truth[truth != task.unknown] >= task.classes):
                raise UserError(f"data: {task.target!r} shows classes above {task.classes - 1}, which training lacks")
            for i in range(len(total)):
                total[i] += counts(truth, predicted[:, i], task)
        return total

    sharding = batch_sharding(mesh)
    best: tuple[float, int, int, Any] = (-1.0, 0, 0, None)
    for epoch in range(EPOCHS):
        order = np.random.default_rng([0, epoch]).permutation(fit_part)
        for n in range(steps):
            loaded = train.batch(order[n * size : (n + 1) * size])
            batch = {name: jax.device_put(loaded[name], sharding) for name in train.spec}
            heads, state = step(heads, state, encoder.params, encoder.stats, batch)
            on_step(1)
        found = confusions(heads, held_out)
        scores = [score(one) for one in found]
        if max(scores) > best[0]:
            chosen = int(np.argmax(scores))
            best = (scores[chosen], chosen, epoch + 1, jax.tree.map(lambda leaf, i=chosen: leaf[i][None], heads))
    held_out_score, chosen, epoch, head = best
    (confusion,) = confusions(head, encoder.test)
    figures = {
        "score": score(confusion), "held_out_score": held_out_score, "rate": RATES[chosen], "epoch": epoch,
        "epochs": EPOCHS, "fitted_images": len(fit_part),
    }  # fmt: skip
    return figures, confusion, found[0].sum(axis=1)


def token_statistics(encoder: FrozenEncoder, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and inverse standard deviation of each number of the tokens of a sample of training images."""
    part = subset(source, sample(len(source), STATISTICS_IMAGES))
    function = encoder.once("tokens", lambda: jax.jit(with_mesh(encoder.program.mesh, encoder.tokens)))
    moments = [
        (found.mean(axis=(0, 1, 2)), np.square(found).mean(axis=(0, 1, 2)), len(found))
        for found, _, _ in encoder.outputs(function, part)
    ]
    weights = [count for _, _, count in moments]
    mean, square = (np.average([one[i] for one in moments], axis=0, weights=weights) for i in (0, 1))
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return mean, 1 / np.maximum(std, 1e-6 * max(float(std.max()), 1e-12))


def counts(truth: np.ndarray, predicted: np.ndarray, task: Task) -> np.ndarray:
    """Returns how often each pair [true, predicted] occurs where the truth is known."""
    known = truth != task.unknown
    flat = truth[known].astype(int) * task.classes + predicted[known]
    return np.bincount(flat, minlength=task.classes**2).reshape(task.classes, task.classes)


def accuracy(confusion: np.ndarray) -> float:
    """Returns the percentage of a confusion matrix [true, predicted] on its diagonal."""
    return 100 * float(np.trace(confusion) / max(confusion.sum(), 1))


def mean_iou(confusion: np.ndarray) -> float:
    """Returns the mean intersection over union in percent, over classes that are there or predicted."""
    right = np.diagonal(confusion)
    union = confusion.sum(axis=0) + confusion.sum(axis=1) - right
    return 100 * float(np.mean(right[union > 0] / union[union > 0])) if union.any() else 0.0
