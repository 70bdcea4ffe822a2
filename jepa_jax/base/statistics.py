"""Confidence intervals of means, accuracies and ratios of speeds.

Speeds vary by factors, so they are compared by their logarithms. A sweep is a two-way table,

    log speed[combination, round] = effect[combination] + effect[round] + noise.

The effect of a round absorbs what slows a whole round down (a busy quarter of an hour). The noise is pooled over all
combinations: with three repeats one combination alone has two degrees of freedom (t = 4.3), a sweep of twelve has 22
(t = 2.1). This assumes that fast and slow combinations scatter by the same percentage.

Where trials ran on several GPUs, each card has an effect of its own as well: two cards of one kind differ by a few
percent, which would otherwise be noise. With fewer than three trials per card the difference stays in the noise.

On a shared machine most repeats agree within a few percent and some are off by half. Huber's fit gives those less
weight (Huber, "Robust Statistics", 1981). Simulated with 12 combinations and 15 % of all repeats slowed by 18 to 45 %:
with three repeats it finds a difference of 10 % in 61 of 100 sweeps, with five in 84, where least squares finds it in 7
and 16; it calls equal combinations different in 14 and 7 of 100. With normal noise the two agree.
"""

import dataclasses
import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

CONFIDENCE = 0.95
NORMAL_95 = 1.959964  # 97.5th percentile of the normal distribution
FASTER, SLOWER, SAME = "faster", "slower", "same within noise"
UNKNOWN = "unknown: too few repeats"
ROUNDING = 1e-9  # log-ratios below this are rounding errors
RANK = 1e-10  # of the largest singular value; smaller ones are rounding: rows and rounds together have no full rank
HUBER = 1.345  # deviations from which a repeat counts less: 95 % as efficient as least squares for normal noise
TRIALS_PER_CARD = 3  # with fewer, an effect of each card would leave nothing to estimate the noise from
ROBUST_FREEDOM = 8  # with fewer degrees of freedom outliers cannot be told from others


def student_quantile(freedom: float, level: float = CONFIDENCE) -> float:
    """Returns Student's t that leaves (1 - level) / 2 above it."""
    from scipy import special  # scipy.stats takes half a second to import

    return float(special.stdtrit(freedom, (1 + level) / 2))


def bonferroni_level(comparisons: int) -> float:
    """Returns the level at which each of several comparisons must hold for all to hold at CONFIDENCE."""
    return 1 - (1 - CONFIDENCE) / max(1, comparisons)


def accuracy_interval(accuracy: float, images: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval in percent of an accuracy in percent on this many independent images.

    Unlike accuracy +- 1.96 standard errors it has a width at 0 and 100 %, and stays between them.

    Reference: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    share, z2 = accuracy / 100, NORMAL_95**2
    centre = (share + z2 / (2 * images)) / (1 + z2 / images)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / images + z2 / (4 * images**2)) / (1 + z2 / images)
    return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)


def speed_interval(speeds: Sequence[float]) -> tuple[float, float] | None:
    """Returns Student's 95 % interval of the geometric mean; None if there is none, as for fewer than two speeds.

    It is valid whatever other combinations do, and wide for few repeats. `compare_speeds` tells two combinations apart
    better, because it pools the noise of all.
    """
    if len(speeds) < 2:
        return None
    logs = np.log(np.asarray(speeds, np.float64))
    half = student_quantile(len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    high = _exp(float(logs.mean()) + half)
    return (_exp(float(logs.mean()) - half), high) if math.isfinite(high) else None


def _exp(value: float) -> float:
    """Returns e^value, infinite where that is too large for a float."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclasses.dataclass(frozen=True)
class PooledNoise:
    """The variance within groups: sum (n-1) s^2 / sum (n-1)."""

    variance: float
    freedom: int

    @classmethod
    def of(cls, groups: Iterable[Sequence[float]]) -> "PooledNoise | None":
        """Returns the noise of all groups; None if no group has two values."""
        several = [values for values in groups if len(values) > 1]
        freedom = sum(len(values) - 1 for values in several)
        if not freedom:
            return None
        return cls(sum((len(values) - 1) * statistics.variance(values) for values in several) / freedom, freedom)

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)

    def half_width(self, *counts: int) -> float:
        """Returns half of Student's 95 % interval of a mean of this many values, or of a difference of two means."""
        return student_quantile(self.freedom) * math.sqrt(self.variance * sum(1 / count for count in counts))


class Measured(Protocol):
    """A combination with its speed in each round."""

    @property
    def combination(self) -> Hashable: ...

    @property
    def speeds(self) -> Mapping[int, float]: ...

    @property
    def cards(self) -> Mapping[int, str]: ...


@dataclasses.dataclass(frozen=True)
class SpeedRatio:
    """Speed of one combination over that of another; without repeats the interval is unbounded."""

    ratio: float
    low: float
    high: float
    verdict: str  # FASTER | SLOWER | SAME | UNKNOWN

    def to_dict(self) -> dict[str, Any]:
        """Returns the ratio for JSON; an unbounded interval is null."""
        known = math.isfinite(self.high)
        ratio = self.ratio if math.isfinite(self.ratio) else None
        return {"ratio": ratio, "interval": [self.low, self.high] if known else None, "verdict": self.verdict}

    def __str__(self) -> str:
        interval = "one repeat: no interval" if self.verdict == UNKNOWN else f"{self.low:.3f} to {self.high:.3f}"
        return f"{self.ratio:.3f}x ({interval})"


@dataclasses.dataclass(frozen=True)
class SpeedModel:
    """The fitted two-way table of a sweep: effects of combinations, and the noise."""

    columns: Mapping[Hashable, int]  # of combinations
    effects: np.ndarray  # of combinations, then of rounds, then of cards
    covariance: np.ndarray  # of the effects, in units of the noise's variance
    estimable: np.ndarray  # projects a contrast on those that the rounds connect
    variance: float  # of the noise
    freedom: int

    @property
    def noise_percent(self) -> float | None:
        """Scatter of one repeat; None without repeats."""
        return 100 * math.sqrt(self.variance) if self.freedom > 0 else None

    def resolution(self, repeats: int) -> float:
        """Returns the smallest relative difference of two speeds that this many repeats can tell from noise."""
        return _exp(student_quantile(self.freedom) * math.sqrt(2 * self.variance / repeats)) - 1

    def repeats_to_resolve(self, share: float) -> int:
        """Returns about how many repeats show a relative difference of `share` in half of all sweeps."""
        return max(2, math.ceil(2 * self.variance * (NORMAL_95 / math.log1p(share)) ** 2))

    def effect(self, row: Measured) -> float:
        """Returns the logarithm of a row's speed without the effect of its rounds, up to a constant."""
        return float(self.effects[self.columns[row.combination]])

    def contrast(self, weights: Mapping[Any, float], level: float = CONFIDENCE) -> SpeedRatio:
        """Returns exp(sum of weight x effect) with its interval; weights that sum to zero give a ratio of speeds."""
        vector = np.zeros(len(self.effects))
        for combination, weight in weights.items():
            if combination not in self.columns:
                return SpeedRatio(math.nan, 0.0, math.inf, UNKNOWN)
            vector[self.columns[combination]] += weight
        if np.abs(vector - self.estimable @ vector).max() > 1e-6:  # no round connects them, not even by way of others
            return SpeedRatio(math.nan, 0.0, math.inf, UNKNOWN)
        value = float(vector @ self.effects)
        if self.freedom <= 0:
            return SpeedRatio(math.exp(value), 0.0, math.inf, UNKNOWN)
        error = math.sqrt(max(0.0, self.variance * float(vector @ self.covariance @ vector)))
        half = student_quantile(self.freedom, level) * error
        low, high = value - half, value + half
        verdict = FASTER if low > ROUNDING else SLOWER if high < -ROUNDING else SAME
        return SpeedRatio(_exp(value), _exp(low), _exp(high), verdict)


def fit_speeds(rows: Sequence[Measured]) -> SpeedModel:
    """Fits the two-way table to all repeats that succeeded, with any pattern of missing ones."""
    points = [(row, number, math.log(speed)) for row in rows for number, speed in row.speeds.items()]
    columns = {key: i for i, key in enumerate(dict.fromkeys(row.combination for row, _, _ in points))}
    rounds = {number: len(columns) + i for i, number in enumerate(sorted({number for _, number, _ in points}))}
    names = sorted({row.cards.get(number, "") for row, number, _ in points})
    if len(names) < 2 or "" in names or len(points) < TRIALS_PER_CARD * len(names):
        names = []  # an effect of each card cannot be fitted
    cards = {name: len(columns) + len(rounds) + i for i, name in enumerate(names)}
    design = np.zeros((len(points), len(columns) + len(rounds) + len(cards)))
    for i, (row, number, _) in enumerate(points):
        design[i, columns[row.combination]] = design[i, rounds[number]] = 1.0
        if cards:
            design[i, cards[row.cards[number]]] = 1.0
    logs = np.array([value for _, _, value in points])
    freedom = len(points) - (int(np.linalg.matrix_rank(design)) if len(points) else 0)
    inverse = np.linalg.pinv(design, RANK)
    if freedom >= ROBUST_FREEDOM:
        effects, variance = huber_fit(design, logs, freedom)
    else:
        effects = inverse @ logs
        variance = float(np.sum(np.square(logs - design @ effects))) / freedom if freedom > 0 else math.nan
    return SpeedModel(columns, effects, inverse @ inverse.T, inverse @ design, variance, freedom)


def huber_fit(design: np.ndarray, logs: np.ndarray, freedom: int) -> tuple[np.ndarray, float]:
    """Returns effects by iteratively reweighted least squares, and the variance of the noise to use with them."""
    count = len(logs)
    weights = np.ones(count)
    for _ in range(30):
        root = np.sqrt(weights)
        effects = np.linalg.pinv(design * root[:, None], RANK) @ (root * logs)
        residuals = np.abs(logs - design @ effects)
        # The median size of a normal deviate is 1 / 1.4826; fitted effects make residuals smaller than the noise.
        limit = HUBER * 1.4826 * float(np.median(residuals)) * math.sqrt(count / freedom)
        if limit < ROUNDING:
            return effects, float(np.sum(np.square(residuals))) / freedom
        weights = np.minimum(1.0, limit / np.maximum(residuals, limit * 1e-9))
    inside = float(np.mean(residuals <= limit))
    correction = 1 + (count - freedom) / count * (1 - inside) / inside
    return effects, correction**2 * float(np.sum(np.square(weights * residuals))) / freedom / inside**2


def compare_speeds(
    row_a: Measured, row_b: Measured, model: SpeedModel | None = None, level: float = CONFIDENCE
) -> SpeedRatio:
    """Returns the speed of A over that of B, from their log-ratios in common rounds.

    With the model of a whole sweep its pooled noise is used, and rows without a common round are compared by way of
    others. Without it the result is Student's interval of the paired log-ratios.
    """
    if row_a.combination == row_b.combination:
        return SpeedRatio(1.0, 1.0, 1.0, SAME)
    model = fit_speeds([row_a, row_b]) if model is None else model
    return model.contrast({row_a.combination: 1.0, row_b.combination: -1.0}, level)
