"""The five protocols: each evaluates a trained encoder at one level and returns figures for JSON."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.statistics import accuracy_interval
from jepa_jax.data.contract import sample
from jepa_jax.data.sources import subset
from jepa_jax.evals import fine_tune as fine_tuning
from jepa_jax.evals.feature_quality import feature_quality, lidar
from jepa_jax.evals.features import OnCount, Split, chance, check_classes
from jepa_jax.evals.few_shot import SHOTS, few_shot
from jepa_jax.evals.knn import knn_accuracy, knn_sweep
from jepa_jax.evals.linear_probe import FITS, PENALTIES, linear_probe
from jepa_jax.evals.trained_encoder import QUALITY_IMAGES, TrainedEncoder
from jepa_jax.runtime.mesh import batch_sharding

FIXED_K, FIXED_TEMPERATURE = 20, 0.07
MOST_CLASSES = 100  # whose confusion matrix is written out


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much of the data the expensive protocols use; eval.json states them."""

    fine_tune_epochs: int = 8
    fine_tune_images: int = 10_000  # of the train split, a tenth of them held out; 0 = all
    lidar_images: int = 500
    lidar_views: int = 10
    pictured_points: int = 800  # of the test split, in the PCA and t-SNE pictures
    untrained: bool = True  # whether protocols on frozen features also measure the encoder before its first step


@dataclasses.dataclass(frozen=True)
class Protocol:
    """One way to evaluate an encoder."""

    title: str
    total: Callable[[TrainedEncoder, Limits], int]  # units of progress that `run` reports
    run: Callable[[TrainedEncoder, int, Limits, OnCount], dict[str, Any]]
    needs_labels: bool = True
    has_reference: bool = True  # whether the untrained encoder is measured too


def run_linear_probe(encoder: TrainedEncoder, level: int, limits: Limits, progress: OnCount) -> dict[str, Any]:
    train, test = encoder.features(level)
    check_classes(train.labels, test.labels, encoder.classes)
    result = linear_probe(train, test, len(encoder.classes), progress)
    figures = {
        "accuracy": result.accuracy,
        "interval_95": accuracy_interval(result.accuracy, len(test.labels)),
        "chance": chance(train, test, len(encoder.classes)),
        "top5_accuracy": result.top5_accuracy,
        "penalty": result.penalty,
        "held_out_accuracy": result.held_out_accuracy,
        "solver": f"L-BFGS; penalty of {', '.join(f'{p:g}' for p in PENALTIES)} chosen on held-out train images",
        **counts(train, test),
    }
    return figures | ({"confusion": result.confusion.tolist()} if len(encoder.classes) <= MOST_CLASSES else {})


def run_knn(encoder: TrainedEncoder, level: int, limits: Limits, progress: OnCount) -> dict[str, Any]:
    train, test = encoder.features(level)
    classes = len(encoder.classes)
    sweep = knn_sweep(train, test, classes, on_images=progress)
    fixed = knn_accuracy(train, test, classes, k=FIXED_K, temperature=FIXED_TEMPERATURE)
    return {
        "accuracy": sweep.accuracy,
        "interval_95": accuracy_interval(sweep.accuracy, len(test.labels)),
        "chance": chance(train, test, classes),
        "k": sweep.k,
        "temperature": sweep.temperature,
        "held_out_accuracy": sweep.held_out_accuracy,
        "fixed_accuracy": fixed,
        "fixed_interval_95": accuracy_interval(fixed, len(test.labels)),
        "fixed_k": FIXED_K,
        "fixed_temperature": FIXED_TEMPERATURE,
        "sweep": {"ks": sweep.ks, "temperatures": sweep.temperatures, "held_out_accuracy": sweep.held_out.tolist()},
        **counts(train, test),
    }


def run_feature_quality(encoder: TrainedEncoder, level: int, limits: Limits, progress: OnCount) -> dict[str, Any]:
    _, test = encoder.features(level)
    figures = feature_quality(
        test.features[sample(len(test.features), QUALITY_IMAGES)], encoder.raw_features(level).features
    )
    figures |= {"lidar": None, "lidar_images": 0, "lidar_views": limits.lidar_views}
    if encoder.config.data.augment.is_random:
        images = min(limits.lidar_images, len(encoder.test))
        views = encoder.view_features(level, images, limits.lidar_views, progress)
        figures |= {"lidar": lidar(views), "lidar_images": images}
    return figures


def run_fine_tune(encoder: TrainedEncoder, level: int, limits: Limits, progress: OnCount) -> dict[str, Any]:
    train, test = encoder.features(level)
    chosen = fine_tune_images(encoder, limits)
    result = fine_tuning.fine_tune(
        fine_tuning.TunableEncoder(
            encoder.params,
            encoder.stats,
            apply=fine_tuning.train_mode(encoder.program, level),
            extract=lambda params, stats, source: encoder.with_weights(params, stats).extract(source, level),
        ),
        (subset(encoder.train, chosen), encoder.test),
        Split(train.features[chosen], train.labels[chosen]),
        len(encoder.classes),
        epochs=limits.fine_tune_epochs,
        flip=encoder.config.data.augment.flip.probability > 0,
        sharding=batch_sharding(encoder.program.mesh),
        on_step=progress,
    )
    figures = result._asdict()
    del figures["params"]
    rates = {"encoder_rate": fine_tuning.ENCODER_RATE, "head_rate": fine_tuning.HEAD_RATE}
    figures |= {
        "interval_95": accuracy_interval(result.accuracy, len(test.labels)),
        "chance": chance(train, test, len(encoder.classes)),
    }
    return figures | rates | {"epochs": limits.fine_tune_epochs, "test_images": len(test.labels)}


def fine_tune_images(encoder: TrainedEncoder, limits: Limits) -> np.ndarray:
    """Returns which images of the train split fine-tuning uses."""
    return sample(len(encoder.train), limits.fine_tune_images)


def run_few_shot(encoder: TrainedEncoder, level: int, limits: Limits, progress: OnCount) -> dict[str, Any]:
    _, test = encoder.features(level)
    result = few_shot(test, on_shots=progress)
    return result | {"chance": 100 / result["ways"] if result["ways"] else None}


def counts(train: Split, test: Split) -> dict[str, int]:
    return {"train_images": len(train.labels), "test_images": len(test.labels)}


PROTOCOLS = {
    "linear_probe": Protocol("linear probe", lambda encoder, limits: FITS, run_linear_probe),
    "knn": Protocol("k-NN", lambda encoder, limits: len(encoder.train) // 10 + len(encoder.test), run_knn),
    "feature_quality": Protocol(
        "feature quality",
        lambda encoder, limits: min(limits.lidar_images, len(encoder.test)) * limits.lidar_views,
        run_feature_quality,
        needs_labels=False,
        has_reference=False,
    ),
    "fine_tune": Protocol(
        "fine-tuning",
        lambda encoder, limits: fine_tuning.num_steps(
            len(fine_tune_images(encoder, limits)), limits.fine_tune_epochs, encoder.program.mesh.size
        ),
        run_fine_tune,
        has_reference=False,  # it would take as long again
    ),
    "few_shot": Protocol("few-shot", lambda encoder, limits: len(SHOTS), run_few_shot),
}


def parse_protocols(text: str, *, labelled: bool = True) -> list[str]:
    """Returns the protocols of names separated by commas, or of `all`: those that the data allows."""
    possible = [name for name, protocol in PROTOCOLS.items() if labelled or not protocol.needs_labels]
    names = possible if text.strip() == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PROTOCOLS:
            raise UserError(f"--protocols={text}: {name!r} is no protocol; use all, or some of {','.join(PROTOCOLS)}")
        if name not in possible:
            raise UserError(
                f"--protocols={text}: {name} needs labels, which the data has not; use {','.join(possible)}"
            )
    return [name for name in PROTOCOLS if name in names]


def parse_levels(text: str, levels: int) -> list[int]:
    """Returns the levels of `all`, or of numbers separated by commas."""
    known = [str(level) for level in range(levels)]
    names = known if text.strip() == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            has = "level 0 alone" if levels == 1 else f"levels {', '.join(known)}"
            raise UserError(f"--levels={text}: {name!r} is no level; this method has {has}; use all or some of them")
    return sorted({int(name) for name in names})
