"""What is kept of a final evaluation to be shown: the best and worst fires, and one spread frame by frame.

Test data choose nothing here but what people get to see.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import scipy.special

from jepa_jax.data.contract import Source
from jepa_jax.data.in_memory import Arrays, InMemorySource
from jepa_jax.projects.wildfire.data.element import fire_element, stacked
from jepa_jax.projects.wildfire.evals.predictor import same_shape_parts
from jepa_jax.projects.wildfire.evals.spread import LISTED_FIRES, FireFigures
from jepa_jax.projects.wildfire.evals.truth import Truth

SHOWN = ("fire", "valid", "wind", "static", "target", "known", "fire_id")
Predict = Callable[[Source], np.ndarray]  # the logits [N, H, W] of a source


def mask_exhibits(
    test: Source, truth: Truth, scores: np.ndarray, threshold: float, figures: FireFigures, predict: Predict
) -> dict[str, np.ndarray]:
    """Returns arrays of the best and worst fires by average precision, and of one spread; {} if no fire has any.

    Of each fire the sequence with the longest history is shown, the best fire first and the worst last: the arrays of
    `fire_spec` [n, ...], and `probability` [n, H, W], `is_best` [n], and AP and AP of new pixels of the whole fire [n].
    `threshold` is a probability. For arrays named `spread_`, see `spread_exhibit`.

    Args:
      test, truth, scores: the elements, what is true of them, and the logits of a model.
      threshold: logit from which a pixel is predicted to burn.
      figures: those of each fire that has an average precision, the worst first.
      predict: the model that made the scores.
    """
    if not figures:
        return {}
    order = list(figures)
    best = order[: -LISTED_FIRES - 1 : -1]
    worst = [fire for fire in order[:LISTED_FIRES] if fire not in best][::-1]
    chosen = [longest(test, np.flatnonzero(truth.fire == fire)) for fire in (*best, *worst)]
    batch = test.batch(np.array(chosen))
    own = [figures[fire] for fire in (*best, *worst)]
    return {
        **{name: batch[name] for name in SHOWN},
        "probability": scipy.special.expit(scores[chosen]).astype(np.float16),
        "is_best": np.arange(len(chosen)) < len(best),
        "threshold": np.float32(scipy.special.expit(threshold)),
        **{
            name: np.array([one[name] for one in own], np.float32)  # NaN for None
            for name in ("average_precision", "new_average_precision")
        },
        **spread_exhibit(test, truth, figures, predict),
    }


def spread_exhibit(test: Source, truth: Truth, figures: FireFigures, predict: Predict) -> dict[str, np.ndarray]:
    """Returns one history with a prediction for each of its frames.

    It is the longest of the median fire by average precision, among those in the largest bucket.

    Returns:
      `spread_masks` [t + 1, H, W]: the history and the mask after it; `spread_probability` [t, H, W]: predicted for
      mask i + 1 by the masks up to i; `spread_wind` [t, 2], `spread_static` [H, W, C], `spread_known` [H, W] and
      `spread_fire_id`.
    """
    *_, (indices, part) = same_shape_parts(test)
    with_positives = [fire for fire in figures if fire in truth.fire[indices]]
    if not with_positives:
        return {}
    fire = with_positives[len(with_positives) // 2]
    index = longest(part, np.flatnonzero(truth.fire[indices] == fire))
    element = {name: array[0] for name, array in part.batch(np.array([index])).items() if name in part.spec}
    history, beginnings = element["valid"], InMemorySource(lambda: prefixes(element))
    return {
        "spread_masks": np.concatenate([element["fire"][history], element["target"][None]])[..., 0],
        "spread_wind": element["wind"][history],
        "spread_static": element["static"],
        "spread_known": element["known"][..., 0],
        "spread_fire_id": element["fire_id"],
        "spread_probability": scipy.special.expit(predict(beginnings)).astype(np.float16),
    }


def longest(source: Source, indices: np.ndarray) -> int:
    """Returns which of some elements has the longest history; the first of equals."""
    return int(indices[np.argmax(source.batch(indices)["valid"].sum(axis=1))])


def prefixes(element: Mapping[str, np.ndarray]) -> Arrays:
    """Returns the beginnings of a history as a batch: element i has its first i + 1 frames, and the next as target.

    They are padded like the history, so that nothing is compiled anew.
    """
    valid = element["valid"]
    masks, wind = np.concatenate([element["fire"][valid], element["target"][None]])[..., 0], element["wind"][valid]
    given: Any = {"fire_id": element["fire_id"], "frames": len(valid), "known": element["known"][..., 0]}
    return stacked([
        {**element, **fire_element(masks[:n], wind[:n], element["static"], masks[n], **given)}
        for n in range(1, len(masks))
    ])  # fmt: skip
