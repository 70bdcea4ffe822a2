"""What needs no network: persistence, dilation of the front, logistic regression and boosted trees of each pixel.

They see training data alone. Scores rank pixels; a threshold chosen on validation data turns them into masks, which is
how the radius of the dilation is chosen.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import scipy.ndimage

from jepa_jax.data.contract import Source
from jepa_jax.evals.features import OnCount, ignore, part_of
from jepa_jax.evals.linear_probe import Standard, fit_softmax, gram_matrix, probe_logits
from jepa_jax.projects.wildfire.evals.predictor import same_shape_parts
from jepa_jax.projects.wildfire.evals.truth import Truth, last_frame

PERSISTENCE = "persistence"
BASELINES = (PERSISTENCE, "dilation", "logistic", "boosting")
NEIGHBOURHOODS = (3, 7)  # pixels per side
FARTHEST, FARTHEST_SHARE = 8, 0.1  # distance that features tell apart: pixels, or a share of the side if that is more
FITTED_PIXELS, FITTED_ELEMENTS = 2**18, 2048  # at most, of training data
PIXELS_AT_ONCE = 2**20  # whose features are in memory
PENALTY = 1e-5  # a dozen weights from thousands of pixels need hardly any

Arrays = Mapping[str, np.ndarray]
Scorer = Callable[[Arrays], np.ndarray]  # gives each pixel of a batch a score [B, H, W]


class Logistic(NamedTuple):
    """A logistic regression on standardised features of single pixels."""

    standard: Standard
    kernel: np.ndarray  # [F, 2]
    bias: np.ndarray  # [2]

    def __call__(self, batch: Arrays) -> np.ndarray:
        """Returns logits [B, H, W]."""
        logits = probe_logits(self._asdict(), self.standard(pixel_features(batch)))
        return logits[..., 1] - logits[..., 0]


class Reference(NamedTuple):
    """What does not depend on the model of a set: the truth, and the scores of the baselines."""

    truth: Truth
    fitted: dict[str, np.ndarray]  # scores [N, H, W] by name, of all but persistence, which the truth tells

    def scores(self, name: str) -> np.ndarray:
        """Returns the scores [N, H, W] of a baseline in float32; those of unknown pixels mean nothing."""
        return (~self.truth.new).astype(np.float32) if name == PERSISTENCE else self.fitted[name]


def read_reference(source: Source, fitted: Mapping[str, Scorer], on_elements: OnCount = ignore) -> Reference:
    """Reads a set once and scores its pixels by dilation and by the baselines that were fitted."""
    truth = Truth.empty(source.spec, len(source))
    scorers: dict[str, Scorer] = {"dilation": lambda batch: -distance(last_frame(batch)), **fitted}  # minus the radius
    scores = {name: np.empty(truth.target.shape, np.float32) for name in scorers}
    for indices, batch in host_batches(source):
        truth.fill(indices, batch)
        for name, scorer in scorers.items():
            scores[name][indices] = scorer(batch)
        on_elements(len(indices))
    return Reference(truth, scores)


def distance(burning: np.ndarray) -> np.ndarray:
    """Returns the Euclidean distance [B, H, W] of pixels to the nearest burning one; the diagonal if nothing burns."""
    each = [scipy.ndimage.distance_transform_edt(~mask) if mask.any() else np.hypot(*mask.shape) for mask in burning]
    return np.stack([np.broadcast_to(values, burning.shape[1:]) for values in each]).astype(np.float32)


def pixel_features(batch: Arrays) -> np.ndarray:
    """Returns features of each pixel [B, H, W, F] in float32.

    They are the last mask, the share of burning pixels in each neighbourhood, minus the distance to the last mask (at
    most FARTHEST), of the last wind the speed and the sine and cosine of its direction, how far the pixel lies downwind
    of a front, and the static channels.
    """
    burning = last_frame(batch).astype(np.float32)
    shares = [scipy.ndimage.uniform_filter(burning, (1, side, side), mode="constant") for side in NEIGHBOURHOODS]
    speed, direction = np.asarray(batch["wind"])[:, -1].T
    angle = 2 * np.pi * direction
    winds = [np.broadcast_to(one[:, None, None], burning.shape) for one in (speed, np.sin(angle), np.cos(angle))]
    nearness = -np.minimum(distance(burning > 0), max(FARTHEST, FARTHEST_SHARE * max(burning.shape[1:])))
    maps = np.stack([burning, *shares, nearness, *winds, downwind(shares[0], speed, angle)], axis=-1)
    return np.concatenate([maps, batch["static"]], axis=-1, dtype=np.float32)


def downwind(share: np.ndarray, speed: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Returns the speed times how steeply the share of burning pixels falls along the wind, [B, H, W].

    It is positive in front of the side of a fire from which the wind blows away, and negative upwind.

    Args:
      share: of burning pixels around each one, [B, H, W]; rows grow southwards, columns eastwards.
      speed, angle: [B]; of the direction that the wind comes from, clockwise from north in radians.
    """
    southwards, eastwards = np.gradient(share, axis=(1, 2))
    rows, columns = (one[:, None, None] for one in (speed * np.cos(angle), -speed * np.sin(angle)))
    return -(rows * southwards + columns * eastwards)


def fit_logistic(train: Source, on_elements: OnCount = ignore) -> Logistic:
    """Fits the logistic regression on known pixels of at most FITTED_ELEMENTS elements, drawn with a fixed seed.

    Classes are drawn as often as they occur. To balance them would mostly add a constant to the logits, which no
    ranking and no threshold chosen afterwards notices, and would show fewer of the negatives that look like positives.
    """
    train = part_of(train, FITTED_ELEMENTS)
    rng, share = np.random.default_rng(0), FITTED_PIXELS / (len(train) * np.prod(train.spec["target"].shape))
    features, labels = [], []
    for indices, batch in host_batches(train):
        known = batch["known"][..., 0]
        drawn = known & (rng.random(known.shape) < share)
        features.append(pixel_features(batch)[drawn])
        labels.append(batch["target"][..., 0][drawn])
        on_elements(len(indices))
    x, y = np.concatenate(features), np.concatenate(labels)
    standard = Standard.of(x)
    x = standard(x)
    weights = fit_softmax(x, y, 2, PENALTY, gram_matrix(x))
    return Logistic(standard, np.asarray(weights["kernel"]), np.asarray(weights["bias"]))


def host_batches(source: Source) -> Iterator[tuple[np.ndarray, Arrays]]:
    """Yields every element of a source once, as indices and batches on this host of a bounded number of pixels."""
    size = max(1, PIXELS_AT_ONCE // int(np.prod(source.spec["target"].shape)))
    for indices, part in same_shape_parts(source):
        for start in range(0, len(part), size):
            some = np.arange(start, min(start + size, len(part)))
            yield indices[some], part.batch(some)
