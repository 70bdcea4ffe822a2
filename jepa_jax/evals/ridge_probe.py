"""Ridge probe: linear regression of numeric targets on frozen, standardised features, solved in closed form.

The only free number, the penalty, is chosen on a part of the *training* set; the test set is used once. Errors are
reported beside those of the mean of the training targets, which needs no features.
"""

from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import Source, target_names
from jepa_jax.evals.evaluators import EncoderEvaluator, Evaluator, Figures, Moment, Stage
from jepa_jax.evals.features import OnCount, Split, held_out_split
from jepa_jax.evals.inference import FrozenEncoder
from jepa_jax.evals.linear_probe import Standard
from jepa_jax.program.step import TrainState

PENALTIES = tuple(10.0**exponent for exponent in range(-6, 3))  # per element, of features with unit variance


class RidgeProbe(EncoderEvaluator):
    title = "ridge probe"
    needs = "targets"

    def measure(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        train, test = encoder.features(level)
        start(1)
        figures = ridge_probe(train, test) | {"coordinates": coordinate_names(encoder.train)}
        self.context.progress.advance(1)
        return figures

    def in_words(self, figures: Figures) -> str:
        untrained = f", untrained {figures['untrained']['r2']:.3f}" if "untrained" in figures else ""
        errors = f"error {np.mean(figures['rmse']):.4g}, of the mean {np.mean(figures['mean_rmse']):.4g}"
        return f"R² {figures['r2']:.3f}{untrained}; {errors}"


class Regression(Evaluator):
    """Evaluator of runs whose data have numeric targets: R² and errors of a ridge probe, before training and after."""

    def due(self, moment: Moment) -> bool:
        at_start = moment.stage == Stage.UNTRAINED and self.context.config.eval.untrained
        return bool(target_names(self.context.train)) and (at_start or moment.stage == Stage.FINAL)

    def run(self, state: TrainState, moment: Moment) -> Figures:
        encoder, progress = self.context.encoder_at(state, moment), self.context.progress
        progress.start("ridge probe", len(encoder.train) + len(encoder.test))
        found = ridge_probe(*encoder.features(on_images=progress.advance))
        if moment.stage == Stage.UNTRAINED:
            return {"untrained_target_r2": found["r2"]}
        return {f"target_{name}": found[name] for name in ("r2", "r2_by_coordinate", "rmse", "mean_rmse")}

    def in_words(self, figures: Figures) -> str:
        return "  ".join(f"R² {value:.3f}" for name, value in figures.items() if name.endswith("target_r2"))


def coordinate_names(source: Source) -> list[str]:
    """Returns a name for each target number, e.g. states[3,1]."""
    names = []
    for name in target_names(source):
        for place in np.ndindex(source.spec[name].shape):
            names.append(name + (f"[{','.join(map(str, place))}]" if place else ""))
    return names


def ridge_probe(train: Split, test: Split) -> dict[str, Any]:
    """Fits on `train` and scores on `test`.

    Returns:
      r2: mean of `r2_by_coordinate`, which is None where the targets of the test split are all equal.
      rmse, mean_rmse: root mean squared errors by coordinate, of the probe and of the mean of the training targets.
      penalty, held_out_r2: what was chosen, and its R² on the held-out training elements.
    """
    standard, (fit_part, score_part) = Standard.of(train.features), held_out_split(len(train.features))
    x, y = standard(train.features).astype(np.float64), train.targets.astype(np.float64)
    if not np.isfinite(x).all():
        raise UserError("ridge probe: features are not finite; the encoder has diverged, train it with a lower rate")
    tried = ridge_predictions(x[fit_part], y[fit_part], x[score_part], PENALTIES)
    scores = [mean_r2(predicted, y[score_part]) for predicted in tried]
    best = int(np.argmax([-np.inf if score is None else score for score in scores]))
    x_test, y_test = standard(test.features).astype(np.float64), test.targets.astype(np.float64)
    (predicted,) = ridge_predictions(x, y, x_test, PENALTIES[best : best + 1])
    return {
        "r2": mean_r2(predicted, y_test),
        "r2_by_coordinate": r2_by_coordinate(predicted, y_test),
        "rmse": rmse(predicted, y_test),
        "mean_rmse": rmse(y.mean(axis=0), y_test),
        "penalty": PENALTIES[best],
        "held_out_r2": scores[best],
        "train_images": len(y),
        "test_images": len(y_test),
    }


@threadpool_limits.wrap(limits=1, user_api="blas")  # threads that wait for each other cost more than they save here
def ridge_predictions(
    x: np.ndarray, y: np.ndarray, x_new: np.ndarray, penalties: tuple[float, ...]
) -> list[np.ndarray]:
    """Returns predictions for `x_new` of the minimum of |x w + b - y|^2 / N + penalty |w|^2, for each penalty.

    The smaller of the two Gram matrices, by features or by elements, is decomposed once for all penalties.
    """
    centre, mean, count = x.mean(axis=0), y.mean(axis=0), len(x)
    x, x_new, y = x - centre, x_new - centre, y - mean
    by_element = count < x.shape[1]
    values, vectors = np.linalg.eigh((x @ x.T if by_element else x.T @ x) / count)
    if by_element:
        left, right = x_new @ (x.T @ vectors), vectors.T @ y
    else:
        left, right = x_new @ vectors, vectors.T @ (x.T @ y)
    return [mean + left @ (right / (np.maximum(values, 0) + penalty)[:, None]) / count for penalty in penalties]


def r2_by_coordinate(predicted: np.ndarray, truth: np.ndarray) -> list[float | None]:
    """Returns 1 - sum of squared errors / sum of squares around the mean for each column; None for a constant one."""
    residual = np.sum(np.square(predicted - truth), axis=0)
    total = np.sum(np.square(truth - truth.mean(axis=0)), axis=0)
    return [float(1 - r / t) if t > 0 else None for r, t in zip(residual, total, strict=True)]


def mean_r2(predicted: np.ndarray, truth: np.ndarray) -> float | None:
    """Returns the mean R² over the columns that vary; None if none does."""
    known = [value for value in r2_by_coordinate(predicted, truth) if value is not None]
    return float(np.mean(known)) if known else None


def rmse(predicted: np.ndarray, truth: np.ndarray) -> list[float]:
    """Returns the root mean squared error of each column."""
    return [float(error) for error in np.sqrt(np.mean(np.square(predicted - truth), axis=0))]
