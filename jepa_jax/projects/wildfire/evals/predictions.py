"""Masks that a model predicts for a whole source, bucket by bucket."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy.special

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Bucketed, Source
from jepa_jax.data.pipeline import DeviceBatch, eval_batches
from jepa_jax.data.sources import subset
from jepa_jax.evals.features import OnCount, delayed_by_one, ignore
from jepa_jax.methods.contract import Batch, PredictorMethod
from jepa_jax.program.build import Program
from jepa_jax.runtime.mesh import batch_sharding, replicated, whole_array

Change = Callable[[np.ndarray, Source], Source]  # of the elements of some indices, e.g. to shuffle their wind


class Prediction(NamedTuple):
    """What a model predicts for some elements of a source."""

    indices: np.ndarray  # [n], of the elements in the source
    logits: np.ndarray  # float32 [n, H, W]
    delivered: DeviceBatch  # the batch on the device; only its first n elements count

    @property
    def batch(self) -> dict[str, np.ndarray]:
        """The n elements on this host, by the names of the source's spec."""
        return {name: whole_array(array)[: len(self.indices)] for name, array in self.delivered.items()}

    @property
    def probabilities(self) -> np.ndarray:
        """Predicted probabilities, float32 [n, H, W]."""
        return scipy.special.expit(self.logits)


class MaskPredictor:
    """Predicts the masks of whole sources with any weights; compiles once per bucket.

    The method of the program has `predict(model, batch, *, train=False)`, which returns float32 [B, H, W, 1].
    """

    def __init__(self, config: Config, program: Program):
        method, factory, mesh = program.method, program.factory, program.mesh
        if not isinstance(method, PredictorMethod):
            raise UserError(f"config.method.name = {config.method.name!r}: predicts no masks; it has no predict")

        def logits(params: Any, stats: Any, batch: Batch) -> jax.Array:
            return method.predict(factory.merge(params, stats), batch)

        shardings = (factory.shardings.params["model"], factory.shardings.stats, batch_sharding(mesh))
        self._logits = jax.jit(logits, in_shardings=shardings, out_shardings=replicated(mesh))
        self._batch_size, self._sharding = config.eval.batch_size, batch_sharding(mesh)

    def __call__(
        self, params: Any, stats: Any, source: Source, *, change: Change | None = None, on_elements: OnCount = ignore
    ) -> Iterator[Prediction]:
        """Yields predictions for every element of a source once, the shortest bucket first.

        Args:
          params, stats: of the model, e.g. from `EvaluationContext.calibrated`.
          change: what to do to elements before they are predicted.
          on_elements: called with the number of elements of each prediction.
        """
        for indices, part in same_shape_parts(source):
            changed = part if change is None else change(indices, part)
            batches = eval_batches(
                changed,
                self._batch_size,
                self._sharding,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
            )
            done = 0
            made = ((self._logits(params, stats, batch), batch, valid) for batch, valid in batches)
            for logits, batch, valid in delayed_by_one(made):
                yield Prediction(indices[done : done + valid], np.asarray(logits)[:valid, ..., 0], batch)
                done += valid
                on_elements(valid)

    def scores(
        self, params: Any, stats: Any, source: Source, *, change: Change | None = None, on_elements: OnCount = ignore
    ) -> np.ndarray:
        """Returns the logits of all elements of a source in its order: float32 [N, H, W]."""
        height, width, _ = source.spec["target"].shape
        scores = np.empty((len(source), height, width), np.float32)
        for prediction in self(params, stats, source, change=change, on_elements=on_elements):
            scores[prediction.indices] = prediction.logits
        return scores


def same_shape_parts(source: Source) -> Iterator[tuple[np.ndarray, Source]]:
    """Yields the parts of a source whose elements share a bucket, with their indices; the whole of one without any."""
    if not isinstance(source, Bucketed):
        yield np.arange(len(source)), source
        return
    for bucket in np.unique(source.buckets):
        indices = np.flatnonzero(source.buckets == bucket)
        yield indices, subset(source.in_bucket(int(bucket)), indices)


class LentWind:
    """The elements of a source, each with the wind of another one: its last frames, and before them its first again."""

    classes = ()

    def __init__(self, source: Source, lenders: np.ndarray):
        """`lenders` [N] says whose wind each element gets."""
        self._source, self._lenders, self.spec = source, lenders, source.spec

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        own, lent = self._source.batch(indices), self._source.batch(self._lenders[indices])
        return {**own, "wind": _fitted(lent, own["valid"])}


def _fitted(lent: Mapping[str, np.ndarray], valid: np.ndarray) -> np.ndarray:
    """Returns wind [B, T, 2] for histories that are `valid` [B, T] from histories that may be shorter or longer."""
    first = np.argmax(lent["valid"], axis=1)[:, None]
    frame = np.maximum(np.arange(valid.shape[1]), first)  # [B, T]
    return np.take_along_axis(lent["wind"], frame[..., None], axis=1) * valid[..., None]


def lenders(fires: np.ndarray) -> np.ndarray:
    """Returns a permutation that gives each element one of another fire, unless a fire has more than half of them."""
    order = np.argsort(fires, kind="stable")
    others = np.empty_like(order)
    others[order] = np.roll(order, len(order) // 2)
    return others
