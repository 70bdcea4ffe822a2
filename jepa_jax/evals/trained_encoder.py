"""Encoders with the data they are evaluated on; features are computed once."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from jepa_jax.base.files import disk_error
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Source
from jepa_jax.data.sources import open_splits
from jepa_jax.evals.calibration import calibrated
from jepa_jax.evals.features import Cache, FeatureCache, OnCount, Split, extract, fingerprint, ignore
from jepa_jax.evals.inference import EncoderFunctions, restore_state, run_config
from jepa_jax.evals.sources import ViewSource, first
from jepa_jax.program.build import Program
from jepa_jax.program.checkpoint import params_sha256
from jepa_jax.program.config import changed_config
from jepa_jax.program.step import evaluated_variables
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.allocator import keep_freed_memory
from jepa_jax.runtime.mesh import batch_sharding, make_mesh

QUALITY_IMAGES = 4096  # test images whose features are looked at without labels


@dataclasses.dataclass(frozen=True)
class FrozenEncoder:
    """The weights of an encoder, and the splits that it is evaluated on."""

    config: Config
    functions: EncoderFunctions
    params: Any
    stats: Any
    train: Source
    test: Source
    cache: Cache

    @property
    def program(self) -> Program:
        return self.functions.program

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def levels(self) -> int:
        return self.program.method.levels

    def extract(
        self, source: Source, level: int = 0, normalised: bool = True, on_images: OnCount = ignore, weights: Any = None
    ) -> Split:
        """Returns the features of a source, not cached; `weights`: other (params, stats) of the same encoder."""
        encode, (params, stats) = self.functions.features(level, normalised), weights or (self.params, self.stats)
        return extract(
            lambda batch: encode(params, stats, batch),
            source,
            batch_size=self.config.eval.batch_size,
            sharding=batch_sharding(self.program.mesh),
            on_images=on_images,
        )

    def train_features(self, level: int = 0, on_images: OnCount = ignore) -> Split:
        """Returns the features of the train split."""
        return self.cache.get(f"level{level}_train", lambda: self.extract(self.train, level, True, on_images))

    def test_features(self, level: int = 0, on_images: OnCount = ignore) -> Split:
        """Returns the features of the test split."""
        return self.cache.get(f"level{level}_test", lambda: self.extract(self.test, level, True, on_images))

    def features(self, level: int = 0, on_images: OnCount = ignore) -> tuple[Split, Split]:
        """Returns the features of both splits."""
        return self.train_features(level, on_images), self.test_features(level, on_images)

    def raw_features(self, level: int = 0, images: int = QUALITY_IMAGES, on_images: OnCount = ignore) -> Split:
        """Returns features before the encoder's last normalisation, of the first test images."""
        source = first(self.test, images)
        return self.cache.get(f"level{level}_raw", lambda: self.extract(source, level, False, on_images))

    def view_features(self, level: int, images: int, views: int, on_images: OnCount = ignore) -> np.ndarray:
        """Returns features [images, views, F] of augmented views of the first test images."""
        source = ViewSource(self.config.data.augment, self.test, images, views)
        name = f"level{level}_views_{images}x{views}"
        split = self.cache.get(name, lambda: self.extract(source, level, True, on_images))
        return split.features.reshape(-1, views, split.features.shape[-1])

    def patch_features(self, images: np.ndarray) -> np.ndarray | None:
        """Returns patch features [B, rows, columns, F] of uint8 images; None for an encoder without a grid."""
        grid = self.functions.feature_map(self.params, self.stats, {"image": images})
        return None if grid is None else np.asarray(grid, np.float32)


@dataclasses.dataclass(frozen=True)
class TrainedEncoder(FrozenEncoder):
    """The encoder of a run's checkpoint."""

    cache: FeatureCache
    step: int
    digest: str  # of the parameters; that of summary.json if those are the evaluated ones


def load(workdir: str | pathlib.Path, *, data_dir: str | None = None) -> TrainedEncoder:
    """Returns the encoder of a run's newest checkpoint with its data, of which `data_dir` is the new place if it moved.

    Raises:
      UserError: the folder holds no run or no checkpoint, or the data is not there.
    """
    keep_freed_memory()
    config, mesh = run_config(workdir), make_mesh(-1, 1)
    changes: dict[str, Any] = {"eval.batch_size": config.eval.batch_size + -config.eval.batch_size % mesh.size}
    config = changed_config(config, changes if data_dir is None else changes | {"data.dir": data_dir})
    train, test = (first(source, config.eval.max_images) for source in open_splits(config.data))
    program, state = restore_state(config, workdir, mesh)
    functions, step = EncoderFunctions(program), int(state.step)
    variables = evaluated_variables(state, config.eval.weights)
    del state  # the optimizer's part of it is large and not needed
    # A checkpoint from the middle of a run has statistics of augmented views; the last one is calibrated already.
    images, batch_size = config.eval.calibration_images, config.eval.batch_size
    params, stats = calibrated(functions, variables, train, num_images=images, batch_size=batch_size)
    identity = {
        "step": step,
        "encoder": params_sha256({"params": params, "stats": stats}),
        "train": fingerprint(train),
        "test": fingerprint(test),
        "augment": config.to_dict()["data"]["augment"],
    }
    folder = Workdir(workdir).path
    try:
        cache = FeatureCache(folder / "eval" / "features", identity)
    except OSError as error:
        raise disk_error(error, folder) from error
    return TrainedEncoder(config, functions, params, stats, train, test, cache, step, params_sha256(params))
