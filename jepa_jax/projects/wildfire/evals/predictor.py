"""Models with fixed weights that predict masks, of a run's checkpoint or in an evaluation."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import scipy.special

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import Bucketed, Source
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.subset import subset
from jepa_jax.evals.features import OnCount, ignore
from jepa_jax.evals.inference import FrozenModel, Function
from jepa_jax.methods.contract import Batch, PredictorMethod, build_method
from jepa_jax.program.config import changed_config
from jepa_jax.program.restore import restore_state, run_config
from jepa_jax.program.step import evaluated_variables
from jepa_jax.projects.wildfire.data.element import expected_specs
from jepa_jax.runtime.mesh import batch_sharding, make_mesh, replicated

READ = ("fire", "wind", "static", "valid")  # arrays of an element that predictions depend on
Change = Callable[[np.ndarray, Source], Source]  # of the elements of some indices, e.g. to shuffle their wind


@dataclasses.dataclass(frozen=True)
class FrozenPredictor(FrozenModel):
    """A model with fixed weights; call it with histories to get the probabilities of the next masks.

    It takes the arrays `fire` [N, T, H, W, 1], `wind` [N, T, 2], `static` [N, H, W, C] and `valid` [N, T] of
    `data.element.fire_spec`, with any N and T, and ignores others. Without `valid`, no frame is padding. It returns
    float32 [N, H, W].

    The method of the program has `predict(model, batch, *, train=False)`, which returns float32 [B, H, W, 1].
    """

    def __post_init__(self) -> None:
        if not isinstance(self.program.method, PredictorMethod):
            name = self.config.method.name
            raise UserError(f"config.method.name = {name!r}: predicts no masks; it has no predict")

    @property
    def max_frames(self) -> int:
        """The most frames of a history, without padding."""
        return self.config.data.max_frames

    def __call__(self, histories: Mapping[str, np.ndarray]) -> np.ndarray:
        return scipy.special.expit(self.in_batches(self._logits, self._padded(self._checked(histories)))[..., 0])

    def scores(self, source: Source, *, change: Change | None = None, on_elements: OnCount = ignore) -> np.ndarray:
        """Returns the logits of all elements of a source in its order: float32 [N, H, W].

        Args:
          source: read bucket by bucket; there is one compilation per bucket.
          change: what to do to elements before they are predicted.
          on_elements: called with the number of elements of each batch.
        """
        height, width, _ = source.spec["target"].shape
        scores = np.empty((len(source), height, width), np.float32)
        for indices, part in same_shape_parts(source):
            changed = part if change is None else change(indices, part)
            batches = self.outputs(self._logits, changed, on_elements)
            scores[indices] = np.concatenate([logits[..., 0] for logits, _, _ in batches])
        return scores

    @property
    def _logits(self) -> Function:
        return self.once("logits", self._make_logits)

    def _make_logits(self) -> Function:
        method, factory, mesh = self.program.method, self.program.factory, self.program.mesh

        def logits(params: Any, stats: Any, batch: Batch) -> jax.Array:
            assert isinstance(method, PredictorMethod)
            return method.predict(factory.merge(params, stats), batch)

        shardings = (factory.shardings.params["model"], factory.shardings.stats, batch_sharding(mesh))
        return jax.jit(logits, in_shardings=shardings, out_shardings=replicated(mesh))

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
    return FrozenPredictor(config, program, *evaluated_variables(state, config.eval.weights))


def same_shape_parts(source: Source) -> Iterator[tuple[np.ndarray, Source]]:
    """Yields the parts of a source whose elements share a bucket, with their indices; the whole of one without any."""
    if not isinstance(source, Bucketed):
        yield np.arange(len(source)), source
        return
    for bucket in np.unique(source.buckets):
        indices = np.flatnonzero(source.buckets == bucket)
        yield indices, subset(source.in_bucket(int(bucket)), indices)
