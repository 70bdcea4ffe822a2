"""Encoders of trained runs: restored from a checkpoint, called with images."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import abstract_batch, image_spec
from jepa_jax.methods.contract import Batch
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.program.config import resolve_config
from jepa_jax.program.step import TrainState, evaluated_variables, make_feature_step, make_statistics_step
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.mesh import make_mesh
from jepa_jax.runtime.start import start_compile_cache


class EncoderFunctions:
    """Compiled functions (params, stats, batch) of a program's encoder; each is compiled once, whatever its weights."""

    def __init__(self, program: Program):
        self.program = program
        self._features: dict[tuple[int, bool], Callable[[Any, Any, Batch], jax.Array]] = {}
        self.statistics = make_statistics_step(program.method, program.factory, program.mesh)
        self.feature_map = jax.jit(self._feature_map)

    def features(self, level: int = 0, normalised: bool = True) -> Callable[[Any, Any, Batch], jax.Array]:
        """Returns the function that computes features [B, F]."""
        if (level, normalised) not in self._features:
            self._features[level, normalised] = make_feature_step(
                self.program.method, self.program.factory, self.program.mesh, level=level, normalised=normalised
            )
        return self._features[level, normalised]

    def _feature_map(self, params: Any, stats: Any, batch: Batch) -> jax.Array | None:
        return self.program.method.feature_map(self.program.factory.merge(params, stats), batch)


class ImageEncoder:
    """A trained encoder. Images are computed in batches of one size, so that nothing is compiled twice.

    Attributes:
      image_size: pixels per side of the images it takes.
      channels: channels of the images it takes.
      feature_dim: how many numbers per image it returns.
    """

    def __init__(self, config: Config, functions: EncoderFunctions, variables: tuple[Any, Any], batch_size: int):
        self.image_size, self.channels = config.data.image_size, config.data.channels
        self._functions, self._variables, self._batch_size = functions, variables, batch_size
        batch = abstract_batch(image_spec(self.image_size, self.channels, labelled=False), batch_size)
        self.feature_dim: int = jax.eval_shape(functions.features(), *variables, batch).shape[-1]
        self._grid = jax.eval_shape(functions.feature_map, *variables, batch)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Returns features [N, feature_dim] in float32 of uint8 images [N, image_size, image_size, channels]."""
        return self._apply(self._functions.features(), images, (self.feature_dim,))

    def patch_tokens(self, images: np.ndarray) -> np.ndarray:
        """Returns features of each patch, [N, rows, columns, F] in float32; UserError for encoders without patches."""
        if self._grid is None:
            raise UserError("patch_tokens: this encoder has no grid of patches; use a ViT, or call the encoder itself")
        return self._apply(self._functions.feature_map, images, self._grid.shape[1:])

    def _apply(self, function: Callable[..., Any], images: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        images, wanted = np.asarray(images), (self.image_size, self.image_size, self.channels)
        if images.dtype != np.uint8 or images.shape[1:] != wanted:
            takes = f"uint8 [N, {', '.join(map(str, wanted))}] with values 0..255"
            raise UserError(f"images: {images.dtype} {images.shape}; this encoder takes {takes}")
        size, results = self._batch_size, [np.zeros((0, *shape), np.float32)]
        for start in range(0, len(images), size):
            part = images[start : start + size]
            padded = np.pad(part, ((0, size - len(part)), (0, 0), (0, 0), (0, 0)))
            results.append(np.asarray(function(*self._variables, {"image": padded}), np.float32)[: len(part)])
        return np.concatenate(results)


def load_encoder(workdir: str | pathlib.Path, *, batch_size: int = 256) -> ImageEncoder:
    """Returns the encoder of a run's newest checkpoint.

    Args:
      workdir: folder of the run.
      batch_size: images per call of the compiled encoder.

    Raises:
      UserError: the folder holds no run, or no checkpoint yet.
    """
    config = run_config(workdir)
    program, state = restore_state(config, workdir, make_mesh(1, 1))
    if not hasattr(program.method, "features"):
        raise UserError(f"{workdir}: config.method.name = {config.method.name!r} learns no encoder")
    variables = evaluated_variables(state, config.eval.weights)
    return ImageEncoder(config, EncoderFunctions(program), variables, batch_size)


def run_config(workdir: str | pathlib.Path) -> Config:
    """Returns the config of a run that has a checkpoint."""
    folder = Workdir(workdir)
    if not folder.path.is_dir():
        raise UserError(f"{folder.path}: there is no such folder; give the folder of a run")
    config = resolve_config(folder.read_config(), lenient=True)
    if not folder.has_checkpoint():
        raise UserError(f"{folder.path}: holds no checkpoint yet; train first, or check the path")
    return config


def restore_state(config: Config, workdir: str | pathlib.Path, mesh: Mesh) -> tuple[Program, TrainState]:
    """Returns the program of a run and the state of its newest checkpoint; its data need not be there."""
    start_compile_cache()
    with Checkpoints(Workdir(workdir).checkpoints, read_only=True) as checkpoints:
        probe = checkpoints.shape("params/probe/bias")
        spec = image_spec(config.data.image_size, config.data.channels, labelled=probe is not None)
        program = build_program(
            config,
            num_train=config.data.batch_size,
            num_classes=probe[0] if probe else 0,
            sample=abstract_batch(spec, config.data.batch_size),
            mesh=mesh,
        )
        return program, checkpoints.restore(program.factory.abstract)[0]
