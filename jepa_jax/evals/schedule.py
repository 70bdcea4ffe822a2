"""What a training run measures of its encoder: before training, each few epochs, and at the end."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jepa_jax.data.contract import Source
from jepa_jax.evals.collapse import feature_spread
from jepa_jax.evals.features import FirstImages, Split, extract
from jepa_jax.evals.knn import knn_accuracy
from jepa_jax.evals.linear_probe import linear_probe, top1
from jepa_jax.program.build import Program
from jepa_jax.program.step import TrainState, evaluated_params, make_feature_step, make_statistics_step
from jepa_jax.runtime.mesh import batch_sharding

UNTRAINED_CALIBRATION_IMAGES = 1024
COLLAPSE_IMAGES = 1024  # test images that the collapse watch looks at
SMOKE_IMAGES = 512  # a run that ends within its first epoch is a test of the set-up: it is measured on a sample


class Evaluator:
    """Accuracies of one run's encoder; features never see augmentation, labels are used by the classifiers alone."""

    def __init__(
        self,
        config: Any,
        program: Program,
        sources: tuple[Source, Source],
        *,
        smoke: bool,
        on_images: Callable[[int], None] = lambda count: None,
        on_skipped: Callable[[Iterable[str]], None] = lambda names: None,
    ):
        self._config, self._mesh = config, program.mesh
        self._on_images = on_images
        limit = config.max_images or (SMOKE_IMAGES if smoke else 0)
        self._train, self._test = (FirstImages(source, limit, on_skipped) for source in sources)
        self._num_classes = len(sources[0].classes)
        self._watched = FirstImages(self._test, COLLAPSE_IMAGES)
        self._encode = make_feature_step(program.method, program.factory, program.mesh)
        self._encode_raw = make_feature_step(program.method, program.factory, program.mesh, normalised=False)
        self._batch_statistics = make_statistics_step(program.method, program.factory, program.mesh)

    @property
    def num_images(self) -> int:
        """Images that a full measurement extracts, for a progress bar."""
        return len(self._train) + len(self._test)

    @property
    def watched_images(self) -> int:
        """Images that `spread` extracts."""
        return len(self._watched)

    def due(self, epoch: int) -> bool:
        """Whether anything is measured at the end of this epoch."""
        return self._divides("every_epochs", epoch) or self._divides("knn_every_epochs", epoch)

    def _divides(self, key: str, epoch: int) -> bool:
        every = self._config[key]
        return bool(every) and epoch % every == 0

    def images_at(self, epoch: int) -> int:
        return self.num_images if self._divides("knn_every_epochs", epoch) else len(self._test)

    def at_epoch(self, state: TrainState, epoch: int) -> dict[str, float]:
        """Test accuracy of the online probe and, when its turn has come, of k-NN."""
        state = self.calibrated(state)
        test = self._features(state, self._test)
        results = {"online_probe_accuracy": online_accuracy(state.params["probe"], test)}
        if self._divides("knn_every_epochs", epoch):
            results["knn_accuracy"] = self._knn(self._features(state, self._train), test)
        return results

    def final(self, state: TrainState) -> dict[str, Any]:
        """Linear probe and k-NN of the trained encoder."""
        train, test = self._features(state, self._train), self._features(state, self._test)
        return {
            "probe_accuracy": linear_probe(train, test, self._num_classes).accuracy,
            "knn_accuracy": self._knn(train, test),
            "online_probe_accuracy": online_accuracy(state.params["probe"], test),
            "feature_dim": train.features.shape[1],
            "probe_train_images": len(train.labels),
            "probe_test_images": len(test.labels),
        }

    def untrained(self, state: TrainState) -> dict[str, float]:
        """Linear probe and k-NN of the encoder as initialised: what training has to beat.

        Its batch statistics are always estimated: a fresh batch norm holds zeros and ones, which is no fair rival.
        """
        state = self._with_statistics_of(state, self._config.calibration_images or UNTRAINED_CALIBRATION_IMAGES)
        train, test = self._features(state, self._train), self._features(state, self._test)
        return {
            "untrained_probe_accuracy": linear_probe(train, test, self._num_classes).accuracy,
            "untrained_knn_accuracy": self._knn(train, test),
        }

    def calibrated(self, state: TrainState) -> TrainState:
        """The state with batch statistics of unaugmented images, if the config asks for them.

        An encoder trained on small crops has running statistics of crops; what it is used on is whole images.
        """
        return self._with_statistics_of(state, self._config.calibration_images)

    def spread(self, state: TrainState) -> dict[str, float]:
        """How far features before their last normalisation spread: what shows a collapse."""
        return feature_spread(self._features(self.calibrated(state), self._watched, self._encode_raw).features)

    def _features(self, state: TrainState, source: Source, encode: Callable | None = None) -> Split:
        params = evaluated_params(state, self._config.weights)
        return extract(
            lambda images: (encode or self._encode)(params, state.stats, images),
            source,
            batch_size=self._config.batch_size,
            sharding=batch_sharding(self._mesh),
            on_batch=self._on_images,
        )

    def _knn(self, train: Split, test: Split) -> float:
        config = self._config
        return knn_accuracy(train, test, self._num_classes, k=config.knn_k, temperature=config.knn_temperature)

    def _with_statistics_of(self, state: TrainState, num_images: int) -> TrainState:
        batch_size = min(self._config.batch_size, len(self._train))
        batch_size -= batch_size % self._mesh.size
        if num_images == 0 or batch_size == 0 or not jax.tree.leaves(state.stats):
            return state
        seen = []
        for start in range(0, num_images, batch_size):
            images = self._train.batch(np.arange(start, start + batch_size) % len(self._train))["image"]
            seen.append(self._batch_statistics(state.params["model"], state.stats, images))
        stats = jax.tree.map(lambda *leaves: leaves[0] if len(leaves) == 1 else sum(leaves) / len(leaves), *seen)
        return dataclasses.replace(state, stats=stats)


def online_accuracy(probe: dict[str, jax.Array], test: Split) -> float:
    """Percent of test images that the probe trained beside the encoder gets right."""
    return top1(jax.device_get(probe), test.features, test.labels)
