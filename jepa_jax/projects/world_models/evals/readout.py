"""What is known of the world, read from latents by ridge regression on fixed random features of them.

The readout is fitted on latents of *encoded* training frames alone. It is solved in closed form, so that it needs no
rate and no seed that could be chosen.
"""

import numpy as np

from jepa_jax.evals.features import held_out_split
from jepa_jax.evals.linear_probe import Standard
from jepa_jax.evals.ridge_probe import PENALTIES, mean_r2, ridge_predictions

HIDDEN = 1024  # random features, beside the latents themselves


def read(train: np.ndarray, targets: np.ndarray, *latents: np.ndarray) -> list[np.ndarray]:
    """Returns what is read from latents [..., D], each as [..., S].

    Args:
      train, targets: latents [N, D] to fit on and what they should give [N, S]; the penalty is chosen on a tenth.
      *latents: what to read.
    """
    standard = Standard.of(train)
    projection = np.random.default_rng(0).standard_normal((train.shape[1] + 1, HIDDEN)) / np.sqrt(train.shape[1])

    def features(z: np.ndarray) -> np.ndarray:
        x = standard(z.reshape(-1, z.shape[-1])).astype(np.float64)
        return np.concatenate([x, np.maximum(x @ projection[:-1] + projection[-1], 0)], axis=1)

    x, y = features(train), targets.astype(np.float64)
    fit_part, score_part = held_out_split(len(x))
    tried = ridge_predictions(x[fit_part], y[fit_part], x[score_part], PENALTIES)
    scores = [mean_r2(predicted, y[score_part]) for predicted in tried]
    best = int(np.argmax([-np.inf if score is None else score for score in scores]))
    (found,) = ridge_predictions(x, y, np.concatenate([features(z) for z in latents]), PENALTIES[best : best + 1])
    ends = np.cumsum([z[..., 0].size for z in latents])
    return [part.reshape(*z.shape[:-1], -1) for part, z in zip(np.split(found, ends[:-1]), latents, strict=True)]
