"""Evaluator of predicted frames: detections and positions that are read from rolled-out latents, by horizon."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jepa_jax.data.contract import Source
from jepa_jax.evals.evaluators import EvaluationContext, Evaluator, Figures, Moment, Stage
from jepa_jax.evals.features import held_out_split, part_of
from jepa_jax.evals.inference import FrozenModel
from jepa_jax.evals.ridge_probe import PENALTIES, mean_r2, ridge_predictions
from jepa_jax.methods.contract import Batch
from jepa_jax.models.pooling import area_means
from jepa_jax.program.step import TrainState, evaluated_variables
from jepa_jax.projects.world_models.evals.cells import (
    CellReadout,
    average_precision,
    cell_pixels,
    fit_cells,
    frames_of,
)
from jepa_jax.projects.world_models.sources.bouncing import CELLS
from jepa_jax.runtime.mesh import batch_sharding, replicated

SEQUENCES = 384  # of each split
SHOWN = 6  # sequences that the report shows
CONTEXT = 2  # true frames that a rollout starts from
FINEST = 16  # cells per side that pictures are decoded from
MODEL, COPY_LAST, ENCODED = "model", "copy_last", "encoded"
FIGURES = {"detection_ap": "detection AP", "position_r2": "position R²"}


@runtime_checkable
class RolloutMethod(Protocol):
    """A method that predicts the latents of frames from those before them."""

    def encode(self, model: Any, frames: Array) -> Float[Array, "b t h w d"]: ...

    def rollout(self, model: Any, latents: Float[Array, "b t h w d"], steps: int) -> Float[Array, "b k h w d"]: ...


class Latents(NamedTuple):
    """Latents [N, T, g, g, d] of the frames of some sequences, those predicted from the first two, and the data."""

    encoded: np.ndarray
    predicted: np.ndarray
    data: Mapping[str, np.ndarray]


class Rollout(Evaluator):
    """Predicts all frames after the second of test sequences, and reads detections and positions from the latents.

    Lists have one figure per horizon, from 1 on. Readouts are fitted on encoded train frames, for the trained and the
    untrained model alike. Baselines: the latent of the second frame for all horizons (copy_last) and the untrained
    model; the latent of the true frame (encoded) is what a readout can reach.
    """

    def __init__(self, context: EvaluationContext):
        super().__init__(context)
        self._model = FrozenModel(context.config, context.program, None, None)  # gets weights in `run`
        self._exhibits: Mapping[str, np.ndarray] = {}

    def due(self, moment: Moment) -> bool:
        return moment.stage == Stage.FINAL or (moment.stage == Stage.UNTRAINED and self.context.config.eval.untrained)

    def run(self, state: TrainState, moment: Moment) -> Figures:
        variables = evaluated_variables(state, self.context.config.eval.weights)
        model, progress = self._model.with_weights(*variables), self.context.progress
        progress.start("rollout", min(SEQUENCES, len(self.context.train)) + min(SEQUENCES, len(self.context.test)))
        train, test = (self._latents(model, source) for source in (self.context.train, self.context.test))
        found = {}
        if "detections" in test.data:
            found["detection_ap"] = detection_scores(train, test)
        if "states" in test.data:
            found["position_r2"] = position_scores(train, test)
        if moment.stage == Stage.UNTRAINED:
            return {f"untrained_{figure}": scores[MODEL] for figure, scores in found.items()}
        self._exhibits = decoded(train, test)
        figures: Figures = {"horizons": test.predicted.shape[1]}
        for figure, scores in found.items():
            figures |= {figure if name == MODEL else f"{name}_{figure}": values for name, values in scores.items()}
            known = [value for value in scores[MODEL] if value is not None]
            figures[f"mean_{figure}"] = float(np.mean(known)) if known else None
        return figures

    def exhibits(self) -> Mapping[str, np.ndarray]:
        """Returns frames [n, T, H, W, C] of some test sequences, and those decoded from predicted latents."""
        return self._exhibits

    def in_words(self, figures: Figures) -> str:
        words = []
        for figure, title in FIGURES.items():
            for prefix in ("", "untrained_"):
                if values := figures.get(f"{prefix}{figure}"):
                    shown = " ".join("–" if value is None else f"{value:.2f}" for value in values)
                    copied = figures.get(f"{COPY_LAST}_{figure}")
                    beside = "" if not copied else " (copy last " + " ".join(f"{v or 0:.2f}" for v in copied) + ")"
                    words.append(f"{title} by horizon {shown}{beside}")
        return "  ".join(words)

    def _latents(self, model: FrozenModel, source: Source) -> Latents:
        part = part_of(source, SEQUENCES)
        function = model.once("rollout", lambda: make_rollout(self.context))
        made = np.concatenate([out for out, _, _ in model.outputs(function, part, self.context.progress.advance)])
        data = part.batch(np.arange(len(part)))
        frames = data["frames"].shape[1]
        return Latents(made[:, :frames], made[:, frames:], data)


def make_rollout(context: EvaluationContext) -> Any:
    """Returns the compiled function (params, stats, batch) -> latents of all frames, then those predicted."""
    program, method = context.program, context.program.method
    assert isinstance(method, RolloutMethod), "the method that names this evaluator predicts latents"

    def rolled_out(params: Any, stats: Any, batch: Batch) -> jax.Array:
        model = program.factory.merge(params, stats)
        encoded = method.encode(model, batch["frames"])
        predicted = method.rollout(model, encoded[:, :CONTEXT], encoded.shape[1] - CONTEXT)
        z = jnp.concatenate([encoded, predicted], axis=1).astype(jnp.float32)
        side = min(FINEST, z.shape[2])
        return area_means(z.reshape(-1, *z.shape[2:]), side).reshape(*z.shape[:2], side, side, -1)

    shardings = (program.factory.shardings.params["model"], program.factory.shardings.stats)
    mesh = program.mesh
    return jax.jit(rolled_out, in_shardings=(*shardings, batch_sharding(mesh)), out_shardings=replicated(mesh))


def coarse(latents: np.ndarray) -> np.ndarray:
    """Returns latents [N, T, g, g, d] as means over the cells of detection maps: [N, T, 8, 8, d]."""
    side = latents.shape[2]
    if side % CELLS:
        return latents
    shape = (*latents.shape[:2], CELLS, side // CELLS, CELLS, side // CELLS, latents.shape[-1])
    return latents.reshape(shape).mean(axis=(3, 5))


def by_source(test: Latents) -> dict[str, np.ndarray]:
    """Returns the latents [N, horizons, ...] that stand for the frames after the second."""
    copies = np.repeat(test.encoded[:, CONTEXT - 1 : CONTEXT], test.predicted.shape[1], axis=1)
    return {MODEL: test.predicted, COPY_LAST: copies, ENCODED: test.encoded[:, CONTEXT:]}


def detection_scores(train: Latents, test: Latents) -> dict[str, list[float | None]]:
    """Returns the average precision over all cells of the detections that are read, by horizon."""
    fitted = coarse(train.encoded)
    maps = train.data["detections"]
    readout = fit_cells(fitted.reshape(-1, *fitted.shape[2:]), maps.reshape(-1, *maps.shape[2:], 1))
    truth = test.data["detections"][:, CONTEXT:]

    def by_horizon(latents: np.ndarray) -> list[float | None]:
        scores = readout(coarse(latents))[..., 0]
        return [average_precision(scores[:, t], truth[:, t]) for t in range(truth.shape[1])]

    return {name: by_horizon(latents) for name, latents in by_source(test).items()}


def position_scores(train: Latents, test: Latents) -> dict[str, list[float | None]]:
    """Returns the mean R² over the states of a ridge regression on all cells, by horizon."""
    x = coarse(train.encoded).reshape(len(train.encoded) * train.encoded.shape[1], -1).astype(np.float64)
    y = train.data["states"].reshape(len(x), -1).astype(np.float64)
    fit_part, score_part = held_out_split(len(x))
    tried = ridge_predictions(x[fit_part], y[fit_part], x[score_part], PENALTIES)
    best = int(np.argmax([mean_r2(predicted, y[score_part]) or -np.inf for predicted in tried]))
    truth, latents = test.data["states"][:, CONTEXT:], by_source(test)
    new = np.concatenate([coarse(one).reshape(-1, x.shape[1]) for one in latents.values()])
    (read,) = ridge_predictions(x, y, new, PENALTIES[best : best + 1])
    parts = np.split(read.reshape(-1, *truth.shape[1:]), len(latents))
    return {
        name: [mean_r2(part[:, t], truth[:, t]) for t in range(truth.shape[1])]
        for name, part in zip(latents, parts, strict=True)
    }


def decoded(train: Latents, test: Latents) -> dict[str, np.ndarray]:
    """Returns some test sequences beside the frames that a readout of pixels gives of their latents."""
    side, frames = train.encoded.shape[2], train.data["frames"]
    shape = frames.shape[2:]
    cells = cell_pixels(frames.reshape(-1, *shape), side)
    readout: CellReadout = fit_cells(train.encoded.reshape(-1, *train.encoded.shape[2:]), cells)
    known = test.encoded[:SHOWN, :CONTEXT]
    return {
        "frames": test.data["frames"][:SHOWN],
        "predicted": frames_of(readout(np.concatenate([known, test.predicted[:SHOWN]], axis=1)), shape),
        "encoded": frames_of(readout(test.encoded[:SHOWN]), shape),
    }
