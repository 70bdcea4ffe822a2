"""Models with fixed weights that predict masks, called with histories of fires."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.data.in_memory import Arrays, InMemorySource
from jepa_jax.methods.contract import PredictorMethod
from jepa_jax.methods.registry import build_method
from jepa_jax.program.config import changed_config
from jepa_jax.program.restore import restore_state, run_config
from jepa_jax.program.step import evaluated_variables
from jepa_jax.projects.wildfire.data.element import expected_specs
from jepa_jax.projects.wildfire.evals.predictions import MaskPredictor
from jepa_jax.runtime.mesh import make_mesh

READ = ("fire", "wind", "static", "valid")  # arrays of an element that predictions depend on


@dataclasses.dataclass(frozen=True)
class FrozenPredictor:
    """A model with fixed weights; call it with histories to get the probabilities of the next masks.

    It takes the arrays `fire` [N, T, H, W, 1], `wind` [N, T, 2], `static` [N, H, W, C] and `valid` [N, T] of
    `data.element.fire_spec`, with any N and T, and ignores others. Without `valid`, no frame is padding. It returns
    float32 [N, H, W].
    """

    config: Config
    predict: MaskPredictor
    params: Any
    stats: Any

    @property
    def image_size(self) -> int:
        """Pixels per side of the masks."""
        return self.config.data.image_size

    @property
    def channels(self) -> int:
        """Channels of `static`."""
        return self.config.data.channels

    @property
    def max_frames(self) -> int:
        """The most frames of a history, without padding."""
        return self.config.data.max_frames

    def __call__(self, histories: Mapping[str, np.ndarray]) -> np.ndarray:
        arrays = self._padded(self._checked(histories))
        predictions = self.predict(self.params, self.stats, InMemorySource(lambda: arrays))
        nothing = np.empty((0, self.image_size, self.image_size), np.float32)
        return np.concatenate([nothing, *(prediction.probabilities for prediction in predictions)])

    def _checked(self, histories: Mapping[str, np.ndarray]) -> Arrays:
        for name in READ[:3]:
            if name not in histories:
                raise UserError(f"histories: {', '.join(histories) or 'nothing'}; add an array named {name}")
        arrays = {name: np.asarray(histories[name]) for name in READ if name in histories}
        length, size = arrays["fire"].shape[:2], self.image_size
        arrays.setdefault("valid", np.ones(length, np.bool_))
        wanted: dict[str, tuple[int, ...]] = {"fire": (*length, size, size, 1), "wind": (*length, 2), "valid": length}
        wanted["static"] = (*length[:1], size, size, self.channels)
        for name, array in arrays.items():
            if array.shape != wanted[name]:
                raise UserError(f"{name}: has shape {array.shape}; this model takes {wanted[name]} with that fire")
            if not ((array >= 0) & (array <= 1)).all():  # also false for NaN
                raise UserError(f"{name}: has values outside [0, 1] or NaN; scale it like the data of the run")
        valid = arrays["valid"].astype(np.bool_)
        if not valid[:, -1:].all() or (valid[:, :-1] > valid[:, 1:]).any() or not length[1]:
            raise UserError("valid: must end with the frames that count; padding comes first")
        return arrays | {"valid": valid}

    def _padded(self, arrays: Arrays) -> Arrays:
        """Returns histories padded to the shortest length of the config that holds them, as those of its data are."""
        frames = int(arrays["valid"].any(0).sum())
        if frames > self.max_frames:
            raise UserError(f"fire: {frames} frames of history; this model takes at most the last {self.max_frames}")
        spec = next(spec for spec in expected_specs(self.config.data) if spec["valid"].shape[0] >= frames)
        missing = spec["valid"].shape[0] - frames

        def fitted(array: np.ndarray) -> np.ndarray:
            kept = array[:, array.shape[1] - frames :]
            return np.pad(kept, ((0, 0), (missing, 0), *[(0, 0)] * (array.ndim - 2)))

        arrays = {name: array if name == "static" else fitted(array) for name, array in arrays.items()}
        arrays["wind"] = arrays["wind"] * arrays["valid"][..., None]
        return {name: arrays[name].astype(spec[name].dtype) for name in READ}


def load_predictor(workdir: str | pathlib.Path, *, batch_size: int = 16) -> FrozenPredictor:
    """See `jepa_jax.projects.wildfire.load_predictor`."""
    config = changed_config(run_config(workdir), {"eval.batch_size": batch_size})
    if not isinstance(build_method(config, total_steps=1), PredictorMethod):
        name = config.method.name
        raise UserError(f"{workdir}: config.method.name = {name!r} predicts no masks; use jepa_jax.load_encoder")
    program, state = restore_state(
        config, workdir, make_mesh(1, 1, jax.local_devices()), expected_specs(config.data)[-1]
    )
    variables = evaluated_variables(state, config.eval.weights)
    return FrozenPredictor(config, MaskPredictor(config, program), *variables)
