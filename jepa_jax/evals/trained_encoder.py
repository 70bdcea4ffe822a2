"""Encoders together with the data they are evaluated on; features are computed once."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import numpy as np
from flax import nnx

from jepa_jax.base.files import disk_error
from jepa_jax.data.contract import Source, sample
from jepa_jax.data.sources import open_splits
from jepa_jax.evals.features import FeatureCache, OnCount, Split, fingerprint, ignore
from jepa_jax.evals.inference import FrozenEncoder, encoder_config
from jepa_jax.evals.sources import ViewSource, part_of
from jepa_jax.methods.registry import build_method
from jepa_jax.program.build import initial_sample
from jepa_jax.program.checkpoint import params_sha256
from jepa_jax.program.config import changed_config
from jepa_jax.program.restore import restore_state
from jepa_jax.program.step import TrainState, evaluated_variables
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.allocator import keep_freed_memory
from jepa_jax.runtime.mesh import make_mesh

QUALITY_IMAGES = 4096  # test images whose features are looked at without labels


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatedEncoder(FrozenEncoder):
    """An encoder and the splits that it is evaluated on; remembers features."""

    train: Source
    test: Source
    known: dict[str, Split] = dataclasses.field(default_factory=dict)

    def with_weights(self, params: Any, stats: Any) -> Self:
        """Returns the encoder with other weights, which remembers no features yet."""
        return dataclasses.replace(self, params=params, stats=stats, known={})

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def levels(self) -> int:
        return self.program.method.levels

    def remembered(self, name: str, compute: Callable[[], Split]) -> Split:
        """Returns the features of this name; computes them the first time."""
        if name not in self.known:
            self.known[name] = compute()
        return self.known[name]

    def train_features(self, level: int = 0, on_images: OnCount = ignore) -> Split:
        """Returns the features of the train split."""
        return self.remembered(f"level{level}_train", lambda: self.extract(self.train, level, True, on_images))

    def test_features(self, level: int = 0, on_images: OnCount = ignore) -> Split:
        """Returns the features of the test split."""
        return self.remembered(f"level{level}_test", lambda: self.extract(self.test, level, True, on_images))

    def features(self, level: int = 0, on_images: OnCount = ignore) -> tuple[Split, Split]:
        """Returns the features of both splits."""
        return self.train_features(level, on_images), self.test_features(level, on_images)

    def raw_features(self, level: int = 0, images: int = QUALITY_IMAGES, on_images: OnCount = ignore) -> Split:
        """Returns features before the encoder's last normalisation, of a sample of test images."""
        test = self.known.get(f"level{level}_test")
        if test is not None and not self.normalises(self.test, level):
            chosen = sample(len(self.test), images)
            on_images(len(chosen))
            return Split(test.features[chosen], test.labels[chosen] if len(test.labels) else test.labels)
        source = part_of(self.test, images)
        return self.remembered(f"level{level}_raw_{images}", lambda: self.extract(source, level, False, on_images))

    def view_features(self, level: int, images: int, views: int, on_images: OnCount = ignore) -> np.ndarray:
        """Returns features [images, views, F] of augmented views of a sample of test images."""
        source = ViewSource(self.config.data.augment, part_of(self.test, images), views)
        name = f"level{level}_views_{images}x{views}"
        split = self.remembered(name, lambda: self.extract(source, level, True, on_images))
        return split.features.reshape(-1, views, split.features.shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedEncoder(EvaluatedEncoder):
    """The encoder of a run's checkpoint; keeps features on disk."""

    results: pathlib.Path  # folder of what is measured
    cache: FeatureCache
    step: int
    digest: str  # of the parameters; that of summary.json if those are the evaluated ones
    data: Mapping[str, Any]  # what distinguishes its splits from others
    initial_state: Callable[[], TrainState]  # before the first step
    prefix: str = ""  # of the names under which features are kept

    def remembered(self, name: str, compute: Callable[[], Split]) -> Split:
        return self.cache.get(f"{self.prefix}{name}", compute)


def load(workdir: str | pathlib.Path, *, data_dir: str | None = None, pool: str | None = None) -> TrainedEncoder:
    """Returns the encoder of a run with its data, of its best checkpoint if it keeps one, or else of its newest.

    Args:
      data_dir: the new place of the data if it moved.
      pool: what features are made of, instead of the run's `eval.pool`.

    Raises:
      UserError: the folder holds no run or no checkpoint, the data is not there, the encoder has no such features.
    """
    keep_freed_memory()
    config, mesh, folder = encoder_config(workdir), make_mesh(-1, 1), Workdir(workdir).path
    changes: dict[str, Any] = {"eval.batch_size": config.eval.batch_size + -config.eval.batch_size % mesh.size}
    config = changed_config(config, changes if data_dir is None else changes | {"data.dir": data_dir})
    sources = open_splits(config.data)
    train, test = (part_of(source, config.eval.max_images) for source in sources)
    program, state = restore_state(config, workdir, mesh, train.spec)
    results = folder / "eval"
    if pool is not None and pool != config.eval.pool:
        results = folder / f"eval_{pool}"  # what was measured of the run's own features stays
        config = changed_config(config, {"eval.pool": pool})
        method = build_method(config, total_steps=program.length.total_steps)
        nnx.eval_shape(method.init, jax.random.key(0), initial_sample(sources[0]))  # refuses what cannot be pooled so
        program = dataclasses.replace(program, method=method)
    params, stats = evaluated_variables(state, config.eval.weights)
    data = {"train": fingerprint(train), "test": fingerprint(test)}
    identity = {
        "step": int(state.step),
        "encoder": params_sha256({"params": params, "stats": stats}),
        **data,
        "pool": config.eval.pool,
        "augment": config.to_dict()["data"]["augment"],
    }
    try:
        cache = FeatureCache(results / "features", identity)
    except OSError as error:
        raise disk_error(error, folder) from error
    return TrainedEncoder(
        config,
        program,
        params,
        stats,
        train=train,
        test=test,
        results=results,
        cache=cache,
        step=int(state.step),
        digest=params_sha256(params),
        data=data,
        initial_state=lambda: program.factory.create(config.train.seed, initial_sample(sources[0])),
    )
