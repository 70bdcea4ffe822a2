"""Fine-tuning: the whole encoder and a linear head learn the labels together, AdamW with a rate for each.

The head starts as the solved linear probe, so that a random head cannot spoil the encoder in its first steps (Kumar et
al. 2022). How many epochs is chosen on a held-out tenth of the training images; the test set is looked at once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jepa_jax.data.contract import Source
from jepa_jax.evals.features import Split, held_out_split
from jepa_jax.evals.linear_probe import Standard, choose_penalty, probe_logits

ENCODER_RATE, HEAD_RATE = 1e-4, 1e-3
WEIGHT_DECAY = 1e-2  # on kernels
WARMUP = 0.1  # of the steps
BATCH_SIZE = 128
SHIFT = 1 / 8  # of the image's side, the largest random shift


class FineTuneResult(NamedTuple):
    """Accuracies in percent; `epoch` is the one that the held-out images chose."""

    accuracy: float
    epoch: int
    held_out_accuracies: list[float]  # after each epoch
    start_accuracy: float  # held-out images, frozen encoder and probe
    encoder_change: float  # |after - before| / |before| over the encoder's parameters
    train_images: int
    steps: int
    params: Any  # of the model, at the chosen epoch


class Encoder(NamedTuple):
    """A method's encoder as fine-tuning needs it."""

    params: Any
    stats: Any
    apply: Callable[
        [Any, Any, jax.Array], tuple[jax.Array, Any]
    ]  # train mode: (params, stats, images) -> [B, F], stats
    extract: Callable[[Any, Any, Source], Split]  # evaluation mode, a whole source


def fine_tune(
    encoder: Encoder,
    sources: tuple[Source, Source],
    features: Split,
    num_classes: int,
    *,
    epochs: int,
    flip: bool,
    sharding: jax.sharding.NamedSharding,
    seed: int = 0,
    on_step: Callable[[int], None] = lambda count: None,
) -> FineTuneResult:
    """Trains on the images of sources[0], whose frozen `features` start the head, and scores on sources[1]."""
    train, test = sources
    fit_part, score_part = held_out_split(len(features.labels))
    standard = Standard.of(features.features)
    _, start_accuracy, head = choose_penalty(standard(features.features), features.labels, num_classes)
    batch_size = fitting_batch(len(fit_part), sharding.mesh.size)
    steps_per_epoch = len(fit_part) // batch_size
    step, params, opt_state = make_step(encoder, head, standard, epochs * steps_per_epoch, flip)
    stats = encoder.stats

    def accuracy(params, stats, source):
        split = encoder.extract(params["model"], stats, source)
        predicted = np.argmax(probe_logits(params["head"], standard(split.features)), axis=1)
        return 100 * float(np.mean(predicted == split.labels))

    held_out = Subset(train, score_part)
    best: tuple[float, int, Any, Any] = (-1.0, 0, None, None)
    scores = []
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(fit_part)
        for n in range(steps_per_epoch):
            batch = train.batch(order[n * batch_size : (n + 1) * batch_size])
            images, labels = (jax.device_put(batch[name], sharding) for name in ("image", "label"))
            key = jax.random.fold_in(jax.random.key(seed), epoch * steps_per_epoch + n)
            params, stats, opt_state = step(params, stats, opt_state, images, labels, key)
            on_step(1)
        scores.append(accuracy(params, stats, held_out))
        if scores[-1] > best[0]:
            best = (scores[-1], epoch + 1, params, stats)
    _, epoch, params, stats = best
    return FineTuneResult(
        accuracy=accuracy(params, stats, test),
        epoch=epoch,
        held_out_accuracies=scores,
        start_accuracy=start_accuracy,
        encoder_change=relative_change(encoder.params, params["model"]),
        train_images=len(fit_part),
        steps=epochs * steps_per_epoch,
        params=params["model"],
    )


def fitting_batch(images: int, multiple: int = 1) -> int:
    """BATCH_SIZE, or less for a small set: at least 8 steps an epoch where that leaves 8 images a batch."""
    size = min(BATCH_SIZE, max(8, images // 8), images)
    return max(multiple, size - size % multiple)


def num_steps(images: int, epochs: int, multiple: int = 1) -> int:
    """Steps that `fine_tune` takes on this many training images, for a progress bar."""
    fit = len(held_out_split(images)[0])
    return epochs * (fit // fitting_batch(fit, multiple))


def make_step(encoder: Encoder, head: Any, standard: Standard, total_steps: int, flip: bool):
    """The compiled step and what it starts from: (step, params {"model", "head"}, optimizer state)."""
    params = {"model": encoder.params, "head": jax.tree.map(jnp.asarray, head)}
    schedules = {
        name: optax.warmup_cosine_decay_schedule(0.0, rate, max(1, round(WARMUP * total_steps)), total_steps + 1)
        for name, rate in (("model", ENCODER_RATE), ("head", HEAD_RATE))
    }
    tx = optax.multi_transform(
        {name: optax.adamw(rate, weight_decay=WEIGHT_DECAY, mask=is_kernel) for name, rate in schedules.items()},
        {name: jax.tree.map(lambda _, name=name: name, tree) for name, tree in params.items()},
    )

    def loss_fn(params, stats, images, labels):
        features, stats = encoder.apply(params["model"], stats, images)
        logits = standard(features) @ params["head"]["kernel"] + params["head"]["bias"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels)), stats

    @jax.jit
    def step(params, stats, opt_state, images, labels, key):
        images = jitter_position(key, images, flip)
        grads, stats = jax.grad(loss_fn, has_aux=True)(params, stats, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state

    return step, params, tx.init(params)


def is_kernel(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def jitter_position(key: jax.Array, images: jax.Array, flip: bool) -> jax.Array:
    """Light augmentation that keeps uint8: a random shift with repeated borders and, if `flip`, mirroring."""
    count, *shape = images.shape  # H, W, C
    height, width, _ = shape
    reach = max(1, round(SHIFT * min(height, width)))
    flip_key, shift_key = jax.random.split(key)
    padded = jnp.pad(images, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="edge")
    offsets = jax.random.randint(shift_key, (count, 2), 0, 2 * reach + 1)

    def cut(image, offset):
        return jax.lax.dynamic_slice(image, (offset[0], offset[1], 0), shape)

    shifted = jax.vmap(cut)(padded, offsets)
    if not flip:
        return shifted
    mirrored = jax.random.bernoulli(flip_key, shape=(count, 1, 1, 1))
    return jnp.where(mirrored, shifted[:, :, ::-1], shifted)


def relative_change(before: Any, after: Any) -> float:
    """|after - before| / |before| over all parameters."""
    difference = optax.global_norm(jax.tree.map(jnp.subtract, after, before))
    return float(difference / jnp.maximum(optax.global_norm(before), 1e-12))


def train_mode(method: Any, graphdef: nnx.GraphDef, level: int) -> Callable:
    """`Encoder.apply` of a method: features with batch statistics of these images, and the statistics it leaves."""

    def apply(params, stats, images):
        model = nnx.merge(graphdef, params, stats, copy=True)
        features = method.features(model, images, level=level, train=True)
        return features, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    return apply


class Subset:
    """Some images of a source."""

    def __init__(self, source: Source, indices: np.ndarray):
        self._source, self._indices = source, indices
        self.classes, self.spec = source.classes, source.spec

    def __len__(self) -> int:
        return len(self._indices)

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        return self._source.batch(self._indices[indices])
