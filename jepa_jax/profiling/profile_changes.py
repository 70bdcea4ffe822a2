"""Compares two profiles: which section changed, by how much, and whether that is more than noise.

Steps are compared in blocks of a quarter of an epoch, what happens once per epoch by epochs. The interval is Welch's t
interval of the difference of means, widened for autocorrelated values (a machine has slow minutes) and for the number
of sections compared (Bonferroni), so that 1 in 20 pairs of equal runs differs.
"""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json
from jepa_jax.base.statistics import CONFIDENCE, bonferroni_level, student_quantile
from jepa_jax.base.text import number
from jepa_jax.profiling.sections import EpochSection

# Sections that happen between steps: one value per epoch.
PER_EPOCH = (EpochSection.VALIDATION_EPOCH, EpochSection.VISUALIZATION_GENERATION, EpochSection.CHECKPOINT)
TOTALS = ("batch_seconds", "epoch_seconds")


@dataclasses.dataclass(frozen=True)
class Change:
    """Seconds of a section in A and B, per step or per epoch."""

    section: str
    per: str  # step or epoch
    a: float
    b: float
    low: float  # of the interval of b - a
    high: float
    n: tuple[int, int]

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def real(self) -> bool:
        """Whether the change is more than noise: the interval excludes 0."""
        return self.low > 0 or self.high < 0

    def verdict(self) -> str:
        if math.isinf(self.high):
            return "too few values to tell"
        return ("slower" if self.difference > 0 else "faster") if self.real else "within noise"


def read_profile(path: str | pathlib.Path) -> dict[str, Any]:
    """Returns the profile of a run's folder, or of the file itself."""
    path = pathlib.Path(path)
    file = path / "profile.json" if path.is_dir() else path
    fix = "name the folder of a profiled run"
    profile = read_json(file, fix)
    try:
        values = samples_of(profile)
        numbers = all(number(value) is not None for section in values.values() for value in section)
    except (KeyError, TypeError, AttributeError):
        numbers = False
    if not numbers:
        raise UserError(f"{file}: not a profile; {fix}") from None
    if not values["batch_seconds"]:
        raise UserError(f"{file}: no epoch has been profiled; let the run go on for one")
    return profile


def compare_profiles(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Change]:
    """Returns the totals, then every section that took time in either profile, largest change first."""
    one, two = samples_of(a), samples_of(b)
    names = [name for name in one if any(one[name]) or any(two.get(name, ()))]
    level = bonferroni_level(len(names))
    changes = [difference(name, one[name], two.get(name, []), level) for name in names]
    totals = [change for change in changes if change.section in TOTALS]
    parts = sorted((c for c in changes if c.section not in TOTALS), key=lambda change: -abs(change.difference))
    return totals + parts


def samples_of(profile: Mapping[str, Any]) -> dict[str, list[float]]:
    """Returns the values of each section; leaves out the first block, a warm-up, if there are enough others."""
    epochs = [epoch for epoch in profile["epochs"] if epoch["blocks"]]
    blocks = [block for epoch in epochs for block in epoch["blocks"]]
    blocks = blocks[1:] if len(blocks) > 3 else blocks
    values = {"batch_seconds": [block["batch_seconds"] for block in blocks]}
    whole = [epoch for epoch in epochs if epoch["steps"] == profile["steps_per_epoch"]] or epochs
    later = whole[1:] if len(whole) > 3 else whole  # the first one compiles
    values["epoch_seconds"] = [epoch["seconds"] for epoch in later]
    for name in profile["sections"]:
        if name in PER_EPOCH:
            values[name] = [epoch["sections"][name] for epoch in later]
        elif name != "compile":
            values[name] = [block["sections"][name] for block in blocks]
    values["compile"] = [epoch["sections"]["compile"] for epoch in epochs[:1]]
    return values


def difference(section: str, a: Sequence[float], b: Sequence[float], level: float) -> Change:
    """Returns Welch's t interval of mean(b) - mean(a); infinite with fewer than two values."""
    per = "epoch" if section in (*PER_EPOCH, "epoch_seconds", "compile") else "step"
    mean_a, mean_b = (statistics.fmean(values) if values else 0.0 for values in (a, b))
    if min(len(a), len(b)) < 2:
        return Change(section, per, mean_a, mean_b, -math.inf, math.inf, (len(a), len(b)))
    sizes = [effective_size(values) for values in (a, b)]
    parts = [statistics.variance(values) / size for values, size in zip((a, b), sizes, strict=True)]
    error, half = math.sqrt(sum(parts)), 0.0
    if error > 0:
        freedom = sum(parts) ** 2 / sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
        half = student_quantile(freedom, level) * error
    shift = mean_b - mean_a
    return Change(section, per, mean_a, mean_b, shift - half, shift + half, (len(a), len(b)))


def effective_size(values: Sequence[float]) -> float:
    """Returns the number of independent values that tell as much as these autocorrelated ones."""
    n, mean = len(values), statistics.fmean(values)
    spread = sum((value - mean) ** 2 for value in values)
    if n < 4 or spread == 0:
        return n
    together = sum((x - mean) * (y - mean) for x, y in zip(values, values[1:], strict=False))
    correlation = min(max(together / spread, 0.0), 0.9)
    return max(2.0, n * (1 - correlation) / (1 + correlation))


def changes_json(changes: Sequence[Change]) -> dict[str, Any]:
    """Returns the changes for JSON; an infinite interval is null."""
    rows = {
        change.section: {
            "a_seconds": change.a,
            "b_seconds": change.b,
            "change_seconds": change.difference,
            "interval": None if math.isinf(change.high) else [change.low, change.high],
            "per": change.per,
            "values": list(change.n),
            "verdict": change.verdict(),
        }
        for change in changes
    }
    return {"changed": [c.section for c in changes if c.real], "confidence": CONFIDENCE, "sections": rows}
