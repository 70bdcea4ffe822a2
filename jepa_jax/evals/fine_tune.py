"""Fine-tuning: the whole encoder and a linear head learn the labels together, AdamW with a rate for each.

The head starts as the solved linear probe, as a random head would damage the encoder in its first steps (Kumar et al.
2022). The number of epochs is chosen on a held-out tenth of the training images; the test set is used once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jepa_jax.data.contract import Source, sample
from jepa_jax.data.subset import subset
from jepa_jax.evals.evaluators import EncoderEvaluator, Figures
from jepa_jax.evals.features import OnCount, Split, accuracy_figures, held_out_split, ignore
from jepa_jax.evals.inference import FrozenEncoder
from jepa_jax.evals.linear_probe import Standard, choose_penalty, gram_matrix, top1
from jepa_jax.methods.contract import Batch
from jepa_jax.program.step import with_mesh
from jepa_jax.program.variables import variables_of
from jepa_jax.runtime.mesh import batch_sharding

ENCODER_RATE, HEAD_RATE = 1e-4, 1e-3
WEIGHT_DECAY = 1e-2  # on kernels
WARMUP = 0.1  # of the steps
BATCH_SIZE = 128
SHIFT = 1 / 8  # of the image's side, the largest random shift


class FineTune(EncoderEvaluator):
    title = "fine-tuning"
    has_reference = False  # it would take as long again

    def measure(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        limits, (train, test) = self.context.limits, encoder.features(level)
        chosen = sample(len(encoder.train), limits.fine_tune_images)
        result, _ = fine_tune(
            encoder,
            (subset(encoder.train, chosen), encoder.test),
            train.part(chosen),
            level=level,
            epochs=limits.fine_tune_epochs,
            start=start,
            on_step=self.context.progress.advance,
        )
        return accuracy_figures(result["accuracy"], train, test, len(encoder.train.classes)) | result


def fine_tune(
    encoder: FrozenEncoder,
    sources: tuple[Source, Source],
    features: Split,
    *,
    epochs: int,
    level: int = 0,
    start: OnCount = ignore,
    on_step: OnCount = ignore,
) -> tuple[Figures, Any]:
    """Trains on the elements of sources[0], whose frozen `features` start the head, and scores on sources[1].

    Returns:
      Figures, with accuracies in percent, and the model's parameters after the epoch that held-out images chose.
    """
    train, test = sources
    sharding = batch_sharding(encoder.program.mesh)
    fit_part, score_part = held_out_split(len(features.labels))
    standard = Standard.of(features.features)
    x = standard(features.features)
    _, start_accuracy, head = choose_penalty(x, features.labels, len(train.classes), gram_matrix(x))
    batch_size = fitting_batch(len(fit_part), sharding.mesh.size)
    steps_per_epoch = len(fit_part) // batch_size
    start(epochs * steps_per_epoch)
    step, params, opt_state = make_step(encoder, level, head, standard, epochs * steps_per_epoch)
    step = jax.jit(with_mesh(sharding.mesh, step))
    stats = encoder.stats

    def accuracy(params: Any, stats: Any, source: Source) -> float:
        split = encoder.with_weights(params["model"], stats).extract(source, level)
        return top1(params["head"], standard(split.features), split.labels)

    best: tuple[float, int, Any, Any] = (-1.0, 0, None, None)
    scores = []
    for epoch in range(epochs):
        order = np.random.default_rng([0, epoch]).permutation(fit_part)
        for n in range(steps_per_epoch):
            loaded = train.batch(order[n * batch_size : (n + 1) * batch_size])
            batch = {name: jax.device_put(loaded[name], sharding) for name in train.spec}
            key = jax.random.fold_in(jax.random.key(0), epoch * steps_per_epoch + n)
            params, stats, opt_state = step(params, stats, opt_state, batch, key)
            on_step(1)
        scores.append(accuracy(params, stats, subset(train, score_part)))
        if scores[-1] > best[0]:
            best = (scores[-1], epoch + 1, params, stats)
    _, epoch, params, stats = best
    figures = {
        "accuracy": accuracy(params, stats, test),
        "epoch": epoch,
        "held_out_accuracies": scores,  # after each epoch
        "start_accuracy": start_accuracy,  # held-out images, frozen encoder and probe
        "encoder_change": relative_change(encoder.params, params["model"]),
        "train_images": len(fit_part),
        "steps": epochs * steps_per_epoch,
        "encoder_rate": ENCODER_RATE,
        "head_rate": HEAD_RATE,
        "epochs": epochs,
    }
    return figures, params["model"]


def fitting_batch(images: int, multiple: int = 1) -> int:
    """Returns BATCH_SIZE, or less for a small set: at least 8 steps per epoch if that leaves 8 images per batch."""
    size = min(BATCH_SIZE, max(8, images // 8), images)
    return max(multiple, size - size % multiple)


def make_step(
    encoder: FrozenEncoder, level: int, head: Any, standard: Standard, total_steps: int
) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the step, its first params {"model", "head"} and its first optimizer state."""
    program, flip = encoder.program, encoder.config.data.augment.flip.probability > 0
    params = {"model": encoder.params, "head": jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), head)}
    schedules = {
        name: optax.warmup_cosine_decay_schedule(0.0, rate, max(1, round(WARMUP * total_steps)), total_steps + 1)
        for name, rate in (("model", ENCODER_RATE), ("head", HEAD_RATE))
    }

    def kernels(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    tx = optax.multi_transform(
        {name: optax.adamw(rate, weight_decay=WEIGHT_DECAY, mask=kernels) for name, rate in schedules.items()},
        {name: jax.tree.map(lambda _, name=name: name, tree) for name, tree in params.items()},
    )

    def loss_fn(params: Any, stats: Any, batch: Batch) -> tuple[jax.Array, Any]:
        model = program.factory.merge(params["model"], stats)
        model.set_attributes(nnx.Dropout, deterministic=True, raise_if_not_found=False)  # there is no key per step
        features = program.encoder_method.features(model, batch, level=level, train=True)
        logits = standard(features) @ params["head"]["kernel"] + params["head"]["bias"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])), variables_of(model)

    def step(params: Any, stats: Any, opt_state: Any, batch: Batch, key: jax.Array) -> tuple[Any, Any, Any]:
        if "image" in batch:
            batch = {**batch} | {"image": jitter_position(key, batch["image"], flip)}
        grads, stats = jax.grad(loss_fn, has_aux=True)(params, stats, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state

    return step, params, tx.init(params)


def jitter_position(key: jax.Array, images: jax.Array, flip: bool) -> jax.Array:
    """Shifts uint8 images at random, repeating their borders, and mirrors half of them if `flip`."""
    count, *shape = images.shape  # H, W, C
    height, width, _ = shape
    reach = max(1, round(SHIFT * min(height, width)))
    flip_key, shift_key = jax.random.split(key)
    padded = jnp.pad(images, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="edge")
    offsets = jax.random.randint(shift_key, (count, 2), 0, 2 * reach + 1)
    cut = jax.vmap(lambda image, offset: jax.lax.dynamic_slice(image, (offset[0], offset[1], 0), shape))
    shifted = cut(padded, offsets)
    if not flip:
        return shifted
    mirrored = jax.random.bernoulli(flip_key, shape=(count, 1, 1, 1))
    return jnp.where(mirrored, shifted[:, :, ::-1], shifted)


def relative_change(before: Any, after: Any) -> float:
    """Returns |after - before| / |before| over all parameters."""
    difference = optax.global_norm(jax.tree.map(jnp.subtract, after, before))
    return float(difference / jnp.maximum(optax.global_norm(before), 1e-12))
