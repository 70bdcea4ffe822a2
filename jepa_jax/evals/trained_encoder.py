"""A run's newest checkpoint as evaluations need it: its encoder, its data, and features that are computed once."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_error
from jepa_jax.config.schema import validate
from jepa_jax.data.augment import augment_views
from jepa_jax.data.contract import Source, abstract_batch
from jepa_jax.data.sources import open_splits
from jepa_jax.evals.feature_cache import FeatureCache, fingerprint
from jepa_jax.evals.features import FirstImages, Split, extract
from jepa_jax.evals.schedule import Evaluator
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.checkpoint import Checkpoints, params_sha256
from jepa_jax.program.step import evaluated_params, make_feature_step
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.allocator import keep_freed_memory
from jepa_jax.runtime.mesh import batch_sharding, make_mesh
from jepa_jax.runtime.start import start_compile_cache

Progress = Callable[[int], None]  # hears how much was done
QUALITY_IMAGES = 4096  # test images whose features are looked at without labels


def ignore(count: int) -> None:
    """A progress that nobody watches."""


@dataclasses.dataclass
class TrainedEncoder:
    """Parameters and statistics of one checkpoint, and the splits they are measured on."""

    config: Any
    program: Program
    params: Any
    stats: Any
    step: int
    digest: str  # of the parameters, as in summary.json where those are the ones evaluated
    train: Source
    test: Source
    cache: FeatureCache
    steps: dict[tuple[int, bool], Callable] = dataclasses.field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.test.classes

    @property
    def levels(self) -> int:
        return self.program.method.levels

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        return batch_sharding(self.program.mesh)

    def feature_step(self, level: int, normalised: bool = True) -> Callable:
        """The compiled function of `make_feature_step`, one for each level and kind."""
        if (level, normalised) not in self.steps:
            program = self.program
            self.steps[level, normalised] = make_feature_step(
                program.method, program.factory, program.mesh, level=level, normalised=normalised
            )
        return self.steps[level, normalised]

    def extract(self, source: Source, level: int, normalised: bool = True, on_images: Progress = ignore) -> Split:
        """Features of the checkpoint, not cached."""
        return self.extract_with(self.params, self.stats, source, level, normalised, on_images)

    def extract_with(
        self, params: Any, stats: Any, source: Source, level: int, normalised: bool = True, on_images: Progress = ignore
    ) -> Split:
        """Features that other parameters of the same encoder give."""
        encode = self.feature_step(level, normalised)
        return extract(
            lambda images: encode(params, stats, images),
            source,
            batch_size=self.config.eval.batch_size,
            sharding=self.sharding,
            on_batch=on_images,
        )

    def features(self, level: int, on_images: Progress = ignore) -> tuple[Split, Split]:
        """Train and test split at a level, from the cache where it has them."""

        def split(name: str, source: Source) -> Split:
            return self.cache.get(f"level{level}_{name}", lambda: self.extract(source, level, True, on_images))

        return split("train", self.train), split("test", self.test)

    def raw_features(self, level: int, on_images: Progress = ignore) -> Split:
        """Features before the encoder's last normalisation of the first test images."""
        source = FirstImages(self.test, QUALITY_IMAGES)
        return self.cache.get(f"level{level}_raw", lambda: self.extract(source, level, False, on_images))

    def view_features(self, level: int, images: int, views: int, on_images: Progress = ignore) -> np.ndarray:
        """Features of augmented views of the first test images: [images, views, F]."""
        source = ViewSource(self.config.data.augment, self.test, images, views)
        name = f"level{level}_views_{images}x{views}"
        split = self.cache.get(name, lambda: self.extract(source, level, True, on_images))
        return split.features.reshape(-1, views, split.features.shape[-1])

    def patch_features(self, images: np.ndarray) -> np.ndarray | None:
        """Patch features [B, gh, gw, F] of uint8 images; None for an encoder without a grid of patches."""
        method, graphdef = self.program.method, self.program.factory.graphdef

        def feature_map(params, stats, images):
            return method.feature_map(nnx.merge(graphdef, params, stats, copy=True), images)

        maps = jax.jit(feature_map)(self.params, self.stats, images)
        return None if maps is None else np.asarray(maps, np.float32)


class ViewSource:
    """Augmented views of the first images of a source as images: view v of image i is number i * views + v."""

    def __init__(self, augment: Any, source: Source, images: int, views: int):
        self._source, self._views, self._images = source, views, min(images, len(source))
        height, width, channels = source.spec["image"].shape
        shape = (augment.crop.size or height, augment.crop.size or width, channels)
        self.classes, self.spec = source.classes, {**source.spec, "image": jax.ShapeDtypeStruct(shape, np.uint8)}
        mean, std = np.asarray(augment.mean, np.float32), np.asarray(augment.std, np.float32)

        def draw(key, images):
            # Back to uint8: what an encoder takes.
            unit = augment_views(key, images, augment, views) * std + mean
            return jax.numpy.clip(255 * unit + 0.5, 0, 255).astype(jax.numpy.uint8)

        self._draw = jax.jit(draw)

    def __len__(self) -> int:
        return self._images * self._views

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        whole = np.unique(indices // self._views)
        padded = np.resize(whole, -(-len(indices) // self._views) + 2)  # one shape, one compilation
        batch = self._source.batch(padded)
        views = np.asarray(self._draw(jax.random.key(int(whole[0])), batch["image"]))  # [V, B, h, w, C]
        place = np.searchsorted(whole, indices // self._views)
        return {key: batch[key][place] for key in self.spec} | {"image": views[indices % self._views, place]}


def has_augmentation(augment: Any) -> bool:
    """Whether two views of an image can differ."""
    groups = ("crop", "flip", "jitter", "grayscale", "blur", "solarize")
    return any(getattr(augment, name).probability > 0 for name in groups)


def load(workdir: str | pathlib.Path, *, data_dir: str | None = None) -> TrainedEncoder:
    """The newest checkpoint of a run on its own data (`data_dir`: where the data lies now, if it moved)."""
    folder = Workdir(workdir)
    if not folder.path.is_dir():
        raise UserError(f"--workdir={folder.path}: there is no such folder; give the folder of a run")
    config = ConfigDict(folder.read_config())
    if data_dir is not None:
        config.data.dir = data_dir
    validate(config)
    if not folder.has_checkpoint():
        raise UserError(f"--workdir={folder.path}: holds no checkpoint yet; train first, or check the path")
    sources = open_splits(config.data)
    keep_freed_memory()
    start_compile_cache()
    mesh = make_mesh(-1, 1)
    config.eval.batch_size += -config.eval.batch_size % mesh.size
    sample = abstract_batch(sources[0].spec, config.eval.batch_size)["image"]
    program = build_program(
        config, num_train=len(sources[0]), num_classes=len(sources[0].classes), sample=sample, mesh=mesh
    )
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        state, _ = checkpoints.restore(program.factory.abstract)
    # A checkpoint from the middle of a run has statistics of augmented views; the last one is calibrated already.
    state = Evaluator(config.eval, program, sources, smoke=False).calibrated(state)
    params, stats, step = evaluated_params(state, config.eval.weights), state.stats, int(state.step)
    del state  # the optimizer's part of it is large and of no use here
    train, test = (FirstImages(source, config.eval.max_images) for source in sources)
    identity = {
        "step": step,
        "encoder": params_sha256({"params": params, "stats": stats}),
        "train": fingerprint(train),
        "test": fingerprint(test),
        "augment": config.data.augment.to_dict(),
    }
    try:
        cache = FeatureCache(folder.path / "eval" / "features", identity)
    except OSError as error:
        raise disk_error(error, folder.path) from error
    return TrainedEncoder(config, program, params, stats, step, params_sha256(params), train, test, cache)
