"""What a training run measures of its encoder: before training, each few epochs, and at the end."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jepa_jax.data.sources import Source
from jepa_jax.evals.features import FirstImages, Split, extract
from jepa_jax.evals.knn import knn_accuracy
from jepa_jax.evals.linear_probe import linear_probe
from jepa_jax.methods import Method
from jepa_jax.models.heads import probe_logits
from jepa_jax.runtime import batch_sharding
from jepa_jax.step import StateFactory, TrainState, make_feature_step

CALIBRATION_STEPS = 10
CALIBRATION_BATCH = 128
SMOKE_IMAGES = 1024  # a run that ends within its first epoch is a test of the set-up: it is measured on a sample


class Evaluator:
    """Accuracies of one run's encoder; features never see augmentation, labels are used by the classifiers alone."""

    def __init__(
        self,
        config: Any,
        method: Method,
        factory: StateFactory,
        mesh: Mesh,
        sources: tuple[Source, Source],
        *,
        smoke: bool,
        on_images: Callable[[int], None],
    ):
        self._config, self._method, self._factory, self._mesh = config, method, factory, mesh
        self._on_images = on_images
        limit = config.max_images or (SMOKE_IMAGES if smoke else 0)
        self._train, self._test = (FirstImages(source, limit) for source in sources)
        self._num_classes = len(sources[0].classes)
        self._encode = make_feature_step(method, factory, mesh)

    @property
    def num_images(self) -> int:
        """Images that a full measurement extracts, for a progress bar."""
        return len(self._train) + len(self._test)

    def due(self, epoch: int) -> bool:
        every = self._config.every_epochs
        return bool(every) and epoch % every == 0

    def at_epoch(self, state: TrainState, epoch: int) -> dict[str, float]:
        """Test accuracy of the online probe and, when its turn has come, of k-NN."""
        test = self._features(state, self._test)
        results = {"online_probe_accuracy": online_accuracy(state.params["probe"], test)}
        every = self._config.knn_every_epochs
        if every and epoch % every == 0:
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

    def untrained(self, state: TrainState) -> float:
        """Linear probe of the encoder as initialised, its batch statistics estimated: what training has to beat."""
        stats = self._calibrated(state)
        train, test = (self._features(state, source, stats) for source in (self._train, self._test))
        return linear_probe(train, test, self._num_classes).accuracy

    def _features(self, state: TrainState, source: Source, stats: Any = None) -> Split:
        stats = state.stats if stats is None else stats
        return extract(
            lambda images: self._encode(state.params["model"], stats, images),
            source,
            batch_size=self._config.batch_size,
            sharding=batch_sharding(self._mesh),
            on_batch=self._on_images,
        )

    def _knn(self, train: Split, test: Split) -> float:
        config = self._config
        return knn_accuracy(train, test, self._num_classes, k=config.knn_k, temperature=config.knn_temperature)

    def _calibrated(self, state: TrainState) -> Any:
        """Batch statistics of the initial weights: a fresh batch norm holds zeros and ones, which is no fair rival."""
        if not jax.tree.leaves(state.stats):
            return state.stats
        graphdef, method = self._factory.graphdef, self._method

        @jax.jit
        def batch_statistics(params, stats, images, key):
            model = nnx.merge(graphdef, params, stats, copy=True)
            for _, module in nnx.iter_modules(model):
                if isinstance(module, nnx.BatchNorm):
                    module.momentum = 0.0  # hold the statistics of this batch alone
            method.loss(model, {"image": images}, key, 0)
            return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

        seen = []
        for i in range(CALIBRATION_STEPS):
            indices = np.arange(i * CALIBRATION_BATCH, (i + 1) * CALIBRATION_BATCH) % len(self._train)
            images = self._train.batch(indices)["image"]
            seen.append(batch_statistics(state.params["model"], state.stats, images, jax.random.key(i)))
        return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *seen)


def online_accuracy(probe: dict[str, jax.Array], test: Split) -> float:
    """Percent of test images that the probe trained beside the encoder gets right."""
    predicted = np.argmax(probe_logits(jax.device_get(probe), test.features), axis=1)
    return 100 * float(np.mean(predicted == test.labels))
