"""Encoders with fixed weights: of a run's checkpoint, called with images or applied to whole data sources."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Source, abstract_batch, abstract_on, fixed_order, image_spec
from jepa_jax.evals.features import OnCount, Split, extract, ignore
from jepa_jax.methods.contract import Batch, EncoderMethod, PatchMethod
from jepa_jax.methods.registry import build_method
from jepa_jax.program.build import Program
from jepa_jax.program.config import changed_config
from jepa_jax.program.restore import restore_state, run_config
from jepa_jax.program.step import (
    evaluated_forward,
    evaluated_variables,
    make_feature_step,
    make_statistics_step,
    pooled_statistics,
)
from jepa_jax.program.variables import with_variables
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.mesh import batch_sharding, make_mesh, replicated

Self = TypeVar("Self", bound="FrozenEncoder")


@dataclasses.dataclass(frozen=True)
class FrozenEncoder:
    """An encoder with fixed weights; copies with other weights share its compiled functions.

    Call it with uint8 images [N, image_size, image_size, channels] to get their features [N, feature_dim] in float32.
    """

    config: Config
    program: Program
    params: Any
    stats: Any
    compiled: dict[Any, Any] = dataclasses.field(default_factory=dict)  # functions, and facts about them

    @property
    def image_size(self) -> int:
        """Pixels per side of the images that it takes."""
        return self.config.data.image_size

    @property
    def channels(self) -> int:
        """Channels of the images that it takes."""
        return self.config.data.channels

    @property
    def feature_dim(self) -> int:
        """How many numbers per image it returns."""
        return jax.eval_shape(self._features(0, True), self.params, self.stats, self._abstract_batch()).shape[-1]

    @property
    def has_patches(self) -> bool:
        """Whether it has features of patches."""
        return jax.eval_shape(self._feature_map, self.params, self.stats, self._abstract_batch()) is not None

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return self._in_batches(self._features(0, True), images)

    def patch_tokens(self, images: np.ndarray) -> np.ndarray:
        """Returns features of each patch of uint8 images: [N, rows, columns, F] in float32.

        Raises:
          UserError: the encoder has no grid of patches.
        """
        if not self.has_patches:
            raise UserError("patch_tokens: this encoder has no grid of patches; use a ViT, or call the encoder itself")
        return self._in_batches(self.compiled.setdefault("patches", jax.jit(self._feature_map)), images)

    def _feature_map(self, params: Any, stats: Any, batch: Batch) -> jax.Array | None:
        method = self.program.method
        if not isinstance(method, PatchMethod):
            return None
        return method.feature_map(self.program.factory.merge(params, stats), batch)

    def _features(self, level: int, normalised: bool) -> Callable[[Any, Any, Batch], jax.Array]:
        if (level, normalised) not in self.compiled:
            method, factory, mesh = self.program.encoder_method, self.program.factory, self.program.mesh
            step = make_feature_step(method, factory, mesh, level=level, normalised=normalised)
            self.compiled[level, normalised] = step
        return self.compiled[level, normalised]

    def _abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        return abstract_batch(image_spec(self.image_size, self.channels, labelled=False), self.config.eval.batch_size)

    def _in_batches(self, function: Callable[..., jax.Array], images: np.ndarray) -> np.ndarray:
        """Applies a function to any number of images, in batches of one size."""
        images, wanted = np.asarray(images), (self.image_size, self.image_size, self.channels)
        if images.dtype != np.uint8 or images.shape[1:] != wanted:
            takes = f"uint8 [N, {', '.join(map(str, wanted))}] with values 0..255"
            raise UserError(f"images: {images.dtype} {images.shape}; this encoder takes {takes}")
        size, results = self.config.eval.batch_size, []
        for start in range(0, max(len(images), 1), size):
            part = images[start : start + size]
            padded = np.pad(part, ((0, size - len(part)), (0, 0), (0, 0), (0, 0)))
            result = function(self.params, self.stats, {"image": padded})
            results.append(np.asarray(result, np.float32)[: len(part)])
        return np.concatenate(results)

    def extract(self, source: Source, level: int = 0, normalised: bool = True, on_images: OnCount = ignore) -> Split:
        """Returns the features of a whole source; not `normalised`: before the encoder's last layer norm."""
        encode, sharding = self._features(level, normalised), batch_sharding(self.program.mesh)
        size = self.config.eval.batch_size
        return extract(lambda batch: encode(self.params, self.stats, batch), source, size, sharding, on_images)

    def normalises(self, source: Source, level: int = 0) -> bool:
        """Returns whether `normalised=False` gives other features: whether it lowers to a different program."""
        if ("normalises", level) not in self.compiled:
            batch = abstract_on(self.program.mesh, source.spec, self.config.eval.batch_size)
            steps: list[Any] = [self._features(level, normalised) for normalised in (True, False)]
            programs = {step.lower(self.params, self.stats, batch).as_text() for step in steps}  # with constants
            self.compiled["normalises", level] = len(programs) > 1
        return self.compiled["normalises", level]

    def _has_batch_statistics(self) -> bool:
        model = nnx.eval_shape(self.program.factory.merge, self.params, self.stats)
        has_any = bool(jax.tree.leaves(nnx.state(model, nnx.BatchStat)))
        return has_any and evaluated_forward(self.program.method) is not None

    def with_weights(self: Self, params: Any, stats: Any) -> Self:
        """Returns the encoder with other weights."""
        return dataclasses.replace(self, params=params, stats=stats)

    def calibrated(self: Self, source: Source, num_images: int, on_images: OnCount = ignore) -> Self:
        """Returns the encoder with batch statistics of unaugmented images of a source; 0 changes nothing.

        An encoder that is trained on small crops has running statistics of crops, but it is used on whole images.
        """
        mesh, statistics = self.program.mesh, self.compiled.get("statistics")
        size = min(self.config.eval.batch_size, len(source)) // mesh.size * mesh.size
        if num_images == 0 or size == 0 or not self._has_batch_statistics():
            return self
        if statistics is None:
            statistics = make_statistics_step(self.program.method, self.program.factory, mesh)
            self.compiled["statistics"] = statistics
        order, seen = fixed_order(len(source)), []
        for start in range(0, num_images, size):
            indices = order[np.arange(start, start + size) % len(source)]
            own = source.batch(np.split(indices, jax.process_count())[jax.process_index()])
            sharding = batch_sharding(mesh)
            batch = {name: jax.make_array_from_process_local_data(sharding, own[name]) for name in source.spec}
            # One at a time: CPU devices that wait for each other in many programs at once can starve.
            seen.append(jax.block_until_ready(statistics(self.params, self.stats, batch)))
            on_images(size)
        everywhere = replicated(mesh)
        pooled = jax.tree.map(
            lambda leaf: jax.make_array_from_callback(leaf.shape, everywhere, lambda index: leaf[index]),
            pooled_statistics(jax.device_get(seen)),
        )
        return self.with_weights(self.params, with_variables(self.stats, pooled))


def load_encoder(workdir: str | pathlib.Path, *, batch_size: int = 256) -> FrozenEncoder:
    """Returns the encoder of a run: of its best checkpoint if `train.keep_best` is set, or else of its newest.

    Args:
      workdir: folder of the run.
      batch_size: images per call of the compiled encoder.

    Raises:
      UserError: the folder holds no run, or no checkpoint yet.
    """
    config = changed_config(encoder_config(workdir), {"eval.batch_size": batch_size})
    program, state = restore_state(config, workdir, make_mesh(1, 1, jax.local_devices()))
    return FrozenEncoder(config, program, *evaluated_variables(state, config.eval.weights))


def encoder_config(workdir: str | pathlib.Path) -> Config:
    """Returns the config of a run that has a checkpoint; raises UserError if its method learns no encoder."""
    config, folder = run_config(workdir), Workdir(workdir)
    method = build_method(config, total_steps=1)
    if not isinstance(method, EncoderMethod):
        fix = f"; {method.loader} loads its model" if method.loader else ""
        raise UserError(
            f"{folder.path}: config.method.name = {config.method.name!r} learns no encoder with features to evaluate; "
            f"its own figures are in {folder.summary} and {folder.report}{fix}"
        )
    return config
