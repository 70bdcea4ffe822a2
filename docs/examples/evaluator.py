"""An evaluator of one's own: how evenly features spread over the sphere, after each epoch and at the end of a run.

    PYTHONPATH=docs/examples jepa-jax train --config=quickstart --config.method.name=evaluator:WatchedJepa --workdir=W

The run logs `sphere/uniformity` and `sphere/alignment`, and summary.json has both. If `run` raises, the state is saved,
the run goes on, and `failed_evaluators` of summary.json says why.
"""

import numpy as np

from jepa_jax.evals.evaluators import Evaluator, Figures, Moment, Stage
from jepa_jax.methods.image_jepa import ImageJepa
from jepa_jax.program.step import TrainState


class Uniformity(Evaluator):
    """log mean exp(-2 |x - y|^2) over pairs of features of unit length (Wang and Isola 2020); lower is more uniform.

    `alignment` is the mean of |x - y|^2 over pairs of the same class; None for data without labels.
    """

    group = "sphere"  # of the metrics

    def due(self, moment: Moment) -> bool:
        return moment.stage == Stage.FINAL or moment.ends(every_epochs=1)

    def run(self, state: TrainState, moment: Moment) -> Figures:
        encoder = self.context.encoder_at(state, moment)
        self.context.progress.start("uniformity", len(encoder.test))  # a bar; a signal may end the run here
        features, labels, _ = encoder.test_features(on_images=self.context.progress.advance)  # [N, F], computed once
        unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
        rows, columns = np.triu_indices(len(unit), 1)
        squared = np.clip(2 - 2 * unit @ unit.T, 0, 4)[rows, columns]
        same = labels[rows] == labels[columns] if len(labels) else np.zeros(len(rows), bool)
        return {  # numbers of Python, numpy or jax, or None
            "uniformity": np.log(np.mean(np.exp(-2 * squared))),
            "alignment": squared[same].mean() if same.any() else None,
        }


class WatchedJepa(ImageJepa):
    """The method of the package, judged by one more evaluator."""

    evaluators = (*ImageJepa.evaluators, "evaluator:Uniformity")
