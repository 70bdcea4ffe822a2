"""Evaluator of predicted latents: the error of positions that are read from them, by horizon, beside baselines."""

from collections.abc import Mapping

import numpy as np

from jepa_jax.data.contract import Source
from jepa_jax.data.in_memory import Arrays
from jepa_jax.evals.evaluators import EvaluationContext, Evaluator, Figures, Moment, Stage
from jepa_jax.evals.features import part_of
from jepa_jax.program.step import TrainState, evaluated_variables
from jepa_jax.projects.world_models.control.model import FrozenWorldModel
from jepa_jax.projects.world_models.evals.readout import read

SEQUENCES = 512  # of each split
SHOWN = 6  # sequences whose predictions are decoded for the report
OF_MODEL, ENCODED, COPY_LAST, OTHER_ACTIONS = "model", "encoded", "copy_last", "other_actions"


class Prediction(Evaluator):
    """Rolls latents of the first frame of test sequences out under their actions, and reads states from them.

    Errors are root mean squared distances in the units of the states, by horizon. Baselines: the latent of the first
    frame for all horizons (copy_last), the actions of another sequence (other_actions), and the model before training.
    The latent of the true frame (encoded) is what the readout can reach. Each encoder has its own readout, fitted on
    training frames.
    """

    def __init__(self, context: EvaluationContext):
        super().__init__(context)
        self.model = FrozenWorldModel(context.config, context.program, None, None)  # gets weights in `run`
        self._exhibits: Mapping[str, np.ndarray] = {}

    def due(self, moment: Moment) -> bool:
        if "states" not in self.context.test.spec:
            return False
        return moment.stage == Stage.FINAL or (moment.stage == Stage.UNTRAINED and self.context.config.eval.untrained)

    def run(self, state: TrainState, moment: Moment) -> Figures:
        variables = evaluated_variables(state, self.context.config.eval.weights)
        model = self.model.with_weights(*variables)
        train, test = (sequences(source) for source in (self.context.train, self.context.test))
        self.context.progress.start("prediction", 2)
        fitted = encoded(model, train["frames"])
        self.context.progress.advance(1)
        latents = predicted_latents(model, test)
        states = train["states"].reshape(-1, train["states"].shape[-1])
        found = read(fitted.reshape(len(states), -1), states, *latents.values())
        truth = test["states"][:, 1:]
        errors = {name: errors_by_horizon(one, truth) for name, one in zip(latents, found, strict=True)}
        self.context.progress.advance(1)
        if moment.stage == Stage.UNTRAINED:
            return {"untrained_position_errors": errors[OF_MODEL]}
        self._exhibits = decoded(model, train, test, fitted, latents)
        return {f"{name}_position_errors": values for name, values in errors.items()} | {
            "position_error": errors[OF_MODEL][-1],
            "horizon": truth.shape[1],
        }

    def exhibits(self) -> Mapping[str, np.ndarray]:
        """Returns true frames [n, T, H, W, C] of some test sequences, and those decoded from predicted latents."""
        return self._exhibits

    def in_words(self, figures: Figures) -> str:
        if "position_error" not in figures:
            return f"position error {figures['untrained_position_errors'][-1]:.3g} (untrained)"
        others = {name: figures[f"{name}_position_errors"][-1] for name in (COPY_LAST, OTHER_ACTIONS, ENCODED)}
        words = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in others.items())
        return f"position error after {figures['horizon']} steps {figures['position_error']:.3g} ({words})"


def sequences(source: Source) -> Arrays:
    """Returns some sequences of a source."""
    part = part_of(source, SEQUENCES)
    return part.batch(np.arange(len(part)))


def encoded(model: FrozenWorldModel, frames: np.ndarray) -> np.ndarray:
    """Returns the latents [N, T, D] of sequences of frames."""
    return model.encode(frames.reshape(-1, *frames.shape[2:])).reshape(*frames.shape[:2], -1)


def predicted_latents(model: FrozenWorldModel, batch: Arrays) -> dict[str, np.ndarray]:
    """Returns latents [N, T - 1, D] of all frames after the first: predicted, and those of baselines."""
    latents, actions = encoded(model, batch["frames"]), batch["actions"][:, :-1]
    return {
        OF_MODEL: model.rollout(latents[:, 0], actions),
        ENCODED: latents[:, 1:],
        COPY_LAST: np.repeat(latents[:, :1], actions.shape[1], axis=1),
        OTHER_ACTIONS: model.rollout(latents[:, 0], np.roll(actions, 1, axis=0)),
    }


def errors_by_horizon(found: np.ndarray, truth: np.ndarray) -> list[float]:
    """Returns the root mean squared distance of states [N, T, S] at each time."""
    return [float(value) for value in np.sqrt(np.mean(np.sum(np.square(found - truth), axis=-1), axis=0))]


def decoded(
    model: FrozenWorldModel, train: Arrays, test: Arrays, fitted: np.ndarray, latents: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the first test sequences, and their frames decoded from predicted latents by a readout of pixels."""
    shape = train["frames"].shape[2:]
    pixels = train["frames"].reshape(-1, int(np.prod(shape))) / 255.0
    found = read(fitted.reshape(len(pixels), -1), pixels, *(latents[name][:SHOWN] for name in (OF_MODEL, ENCODED)))
    pictures = [np.clip(255 * one, 0, 255).astype(np.uint8).reshape(*one.shape[:2], *shape) for one in found]
    return {"frames": test["frames"][:SHOWN], "predicted": pictures[0], "encoded": pictures[1]}
