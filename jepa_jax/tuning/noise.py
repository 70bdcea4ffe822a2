"""How sure a difference of speeds is: intervals and comparisons of rows that were measured in the same rounds.

Speeds vary by factors, so everything here is about their logarithms. A sweep is a two-way table,

    log speed[combination, round] = effect[combination] + effect[round] + noise,

The effect of a round takes up what slows a whole round down (a busy quarter of an hour). The noise is pooled over all
combinations: with three repeats a combination alone has two degrees of freedom (t = 4.3), a sweep of twelve has 22
(t = 2.1). That assumes that fast and slow combinations scatter by the same percentage.

On a shared machine most repeats agree within a few percent and some are off by half. Huber's fit counts those less
(Huber, "Robust Statistics", 1981). Simulated, 12 combinations, 15 % of all repeats slowed by 18 to 45 %: with three
repeats it finds a difference of 10 % in 61 of 100 sweeps, with five in 84, where least squares finds it in 7 and 16; it
calls equal combinations different in 14 and 7 of 100. With normal noise the two agree.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CONFIDENCE = 0.95
FASTER, SLOWER, SAME = "faster", "slower", "same within noise"
UNKNOWN = "unknown: too few repeats"
# Below this a log-ratio is rounding.
ROUNDING = 1e-9
HUBER = 1.345  # deviations from which a repeat counts less: 95 % as good as least squares where noise is normal
ROBUST_FREEDOM = 8  # with fewer degrees of freedom nobody can tell which repeat is off

Row = Mapping[str, Any]
Key = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Speed of one over that of another, and the interval of the ratio; without repeats the interval has no ends."""

    ratio: float
    low: float
    high: float
    verdict: str  # FASTER | SLOWER | SAME | UNKNOWN

    def as_dict(self) -> dict[str, Any]:
        """For JSON: an interval without ends is null."""
        known = math.isfinite(self.high)
        ratio = self.ratio if math.isfinite(self.ratio) else None
        return {"ratio": ratio, "interval": [self.low, self.high] if known else None, "verdict": self.verdict}

    def __str__(self) -> str:
        interval = f" ({self.low:.3f} to {self.high:.3f})" if math.isfinite(self.high) else " (one repeat: no interval)"
        return f"{self.ratio:.3f}x{interval}"


@dataclasses.dataclass(frozen=True)
class Fit:
    """The two-way table of a sweep: effects of combinations, and what is known of the noise."""

    columns: Mapping[Key, int]
    effects: np.ndarray  # of combinations, then of rounds
    covariance: np.ndarray  # of the effects, in units of the noise's variance
    estimable: np.ndarray  # projects a contrast on those that the rounds connect
    variance: float  # of the noise
    freedom: int

    @property
    def noise_percent(self) -> float | None:
        """Scatter of one repeat; None without repeats."""
        return 100 * math.sqrt(self.variance) if self.freedom > 0 else None

    def resolution(self, repeats: int) -> float:
        """Two combinations whose speeds differ by a smaller share than this are within the noise of so many repeats."""
        return math.expm1(quantile(self.freedom) * math.sqrt(2 * self.variance / repeats))

    def repeats_to_resolve(self, share: float) -> int:
        """About so many repeats are needed for a difference of this share to leave the noise, as often as not."""
        normal = 1.96
        return max(2, math.ceil(2 * self.variance * (normal / math.log1p(share)) ** 2))

    def effect(self, row: Row) -> float:
        """Logarithm of a row's speed, up to a constant that all rows share, freed of the rounds it was measured in."""
        return float(self.effects[self.columns[row_key(row)]])

    def contrast(self, weights: Mapping[Key, float], level: float = CONFIDENCE) -> Comparison:
        """exp(sum of weight x effect) with its interval; weights that sum to zero make a ratio of speeds."""
        vector = np.zeros(len(self.effects))
        for key, weight in weights.items():
            if key not in self.columns:
                return Comparison(math.nan, 0.0, math.inf, UNKNOWN)
            vector[self.columns[key]] += weight
        if np.abs(vector - self.estimable @ vector).max() > 1e-6:  # never in one round, nor by way of others
            return Comparison(math.nan, 0.0, math.inf, UNKNOWN)
        value = float(vector @ self.effects)
        if self.freedom <= 0:
            return Comparison(math.exp(value), 0.0, math.inf, UNKNOWN)
        error = math.sqrt(max(0.0, self.variance * float(vector @ self.covariance @ vector)))
        half = quantile(self.freedom, level) * error
        low, high = value - half, value + half
        verdict = FASTER if low > ROUNDING else SLOWER if high < -ROUNDING else SAME
        return Comparison(math.exp(value), math.exp(low), math.exp(high), verdict)


def quantile(freedom: float, level: float = CONFIDENCE) -> float:
    """Student's t that leaves (1 - level) / 2 above it."""
    from scipy import special  # not scipy.stats, which takes half a second to import

    return float(special.stdtrit(freedom, (1 + level) / 2))


def typical(values: Sequence[float]) -> float:
    """The geometric mean: the middle of `t_interval`."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % Student interval of the mean, from these values alone, on the log scale; None for fewer than two.

    It is a row's own interval (`samples_per_sec_ci95`): honest about one row whatever the others do, and wide for
    few repeats. To tell two rows apart use `compare`, which pools.
    """
    if len(values) < 2:
        return None
    logs = np.log(np.asarray(values, np.float64))
    half = quantile(len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return math.exp(float(logs.mean()) - half), math.exp(float(logs.mean()) + half)


def row_key(row: Row) -> Key:
    return tuple(sorted(row["combination"].items()))


def speeds(row: Row) -> dict[int, float]:
    """Images a second of each round that succeeded."""
    return {
        repeat["round"]: float(repeat["samples_per_sec"])
        for repeat in row.get("repeats") or ()
        if repeat.get("status") == "ok" and repeat.get("samples_per_sec")
    }


def fit(rows: Sequence[Row]) -> Fit:
    """Of all repeats that succeeded; any pattern of missing ones will do."""
    points = [(row_key(row), number, math.log(speed)) for row in rows for number, speed in speeds(row).items()]
    columns = {key: i for i, key in enumerate(dict.fromkeys(key for key, _, _ in points))}
    rounds = {number: len(columns) + i for i, number in enumerate(sorted({number for _, number, _ in points}))}
    design = np.zeros((len(points), len(columns) + len(rounds)))
    for i, (key, number, _) in enumerate(points):
        design[i, columns[key]] = design[i, rounds[number]] = 1.0
    logs = np.array([value for _, _, value in points])
    freedom = len(points) - (int(np.linalg.matrix_rank(design)) if len(points) else 0)
    inverse = np.linalg.pinv(design)
    if freedom >= ROBUST_FREEDOM:
        effects, variance = huber_fit(design, logs, freedom)
    else:
        effects = inverse @ logs
        variance = float(np.sum(np.square(logs - design @ effects))) / freedom if freedom > 0 else math.nan
    return Fit(
        columns=columns,
        effects=effects,
        covariance=inverse @ inverse.T,
        estimable=inverse @ design,
        variance=variance,
        freedom=freedom,
    )


def huber_fit(design: np.ndarray, logs: np.ndarray, freedom: int) -> tuple[np.ndarray, float]:
    """Effects by iteratively reweighted least squares, and what stands for the variance of the noise."""
    count = len(logs)
    weights = np.ones(count)
    for _ in range(30):
        root = np.sqrt(weights)
        effects = np.linalg.pinv(design * root[:, None]) @ (root * logs)
        residuals = np.abs(logs - design @ effects)
        # The median of a normal deviate's size is 1 / 1.4826; residuals are smaller than noise, as effects were fitted.
        limit = HUBER * 1.4826 * float(np.median(residuals)) * math.sqrt(count / freedom)
        if limit < ROUNDING:
            return effects, float(np.sum(np.square(residuals))) / freedom
        weights = np.minimum(1.0, limit / np.maximum(residuals, limit * 1e-9))
    inside = float(np.mean(residuals <= limit))
    correction = 1 + (count - freedom) / count * (1 - inside) / inside
    return effects, correction**2 * float(np.sum(np.square(weights * residuals))) / freedom / inside**2


def compare(row_a: Row, row_b: Row, model: Fit | None = None, level: float = CONFIDENCE) -> Comparison:
    """Speed of A over B, by their log-ratios in common rounds.

    With the `fit` of a whole sweep its pooled noise decides, and rows without a common round are compared by way of
    others. Without it the two rows stand alone: Student's interval of the paired log-ratios.
    """
    model = fit([row_a, row_b]) if model is None else model
    key_a, key_b = row_key(row_a), row_key(row_b)
    if key_a == key_b:
        return Comparison(1.0, 1.0, 1.0, SAME)
    return model.contrast({key_a: 1.0, key_b: -1.0}, level)
