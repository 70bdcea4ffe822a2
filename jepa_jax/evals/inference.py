"""Using a trained encoder: images in, features out."""

import pathlib
from collections.abc import Callable

import jax
import numpy as np
from ml_collections import ConfigDict

from jepa_jax.base.errors import UserError
from jepa_jax.config.schema import validate
from jepa_jax.program.build import build_program
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.program.step import evaluated_params, make_feature_step
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.mesh import make_mesh
from jepa_jax.runtime.start import start_compile_cache


def load_encoder(workdir: str | pathlib.Path, *, batch_size: int = 256) -> Callable[[np.ndarray], np.ndarray]:
    """The newest checkpoint of a run as a function: uint8 images [N, H, W, 3] -> float32 features [N, F].

    Any N: images are computed in batches of one fixed size, so nothing is compiled twice.
    """
    folder = Workdir(workdir)
    config = ConfigDict(folder.read_config())
    validate(config)
    if not folder.has_checkpoint():
        raise UserError(f"{folder.path}: no checkpoint yet; train first, or check the path")
    start_compile_cache()
    mesh = make_mesh(1, 1)
    size = config.data.image_size
    sample = jax.ShapeDtypeStruct((batch_size, size, size, 3), np.uint8)
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        num_classes = checkpoints.shape("params/probe/bias")[0]
        program = build_program(
            config, num_train=config.data.batch_size, num_classes=num_classes, sample=sample, mesh=mesh
        )
        state, _ = checkpoints.restore(program.factory.abstract)
    params, stats = evaluated_params(state, config.eval.weights), state.stats
    feature_dim = state.params["probe"]["kernel"].shape[0]
    del state  # the optimizer's part of it is large and of no use here
    encode_batch = make_feature_step(program.method, program.factory, mesh)

    def encode(images: np.ndarray) -> np.ndarray:
        images = np.asarray(images)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (size, size, 3):
            wanted = f"uint8 [N, {size}, {size}, 3] with values 0..255"
            raise UserError(f"images: {images.dtype} {images.shape}; this encoder takes {wanted}")
        chunks = []
        for start in range(0, len(images), batch_size):
            chunk = images[start : start + batch_size]
            padded = np.pad(chunk, ((0, batch_size - len(chunk)), (0, 0), (0, 0), (0, 0)))
            chunks.append(np.asarray(encode_batch(params, stats, padded))[: len(chunk)])
        return np.concatenate(chunks) if chunks else np.zeros((0, feature_dim), np.float32)

    return encode
