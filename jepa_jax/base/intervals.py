"""Quantiles and intervals of measured figures."""

import math

CONFIDENCE = 0.95
NORMAL_95 = 1.959964  # 97.5th percentile of the normal distribution


def student_quantile(freedom: float, level: float = CONFIDENCE) -> float:
    """Returns Student's t that leaves (1 - level) / 2 above it."""
    from scipy import special  # scipy.stats takes half a second to import

    return float(special.stdtrit(freedom, (1 + level) / 2))


def accuracy_interval(accuracy: float, images: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval in percent of an accuracy in percent on this many independent images.

    Unlike accuracy +- 1.96 standard errors it has a width at 0 and 100 %, and stays between them.

    Reference: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    share, z2 = accuracy / 100, NORMAL_95**2
    centre = (share + z2 / (2 * images)) / (1 + z2 / images)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / images + z2 / (4 * images**2)) / (1 + z2 / images)
    return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)
