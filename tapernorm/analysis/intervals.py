"""What several seeds tell: intervals, paired differences, outliers. Plain numbers; nothing here knows of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

LEVEL = 0.95
# Iglewicz and Hoaglin (1993): |modified z| above 3.5 is an outlier. Under 5 values the median and the deviations
# from it hang on single values, so that one seed among three can be told from the others in no way.
OUTLIER_Z = 3.5
OUTLIER_MIN = 5

Key = TypeVar("Key")


@dataclass(frozen=True)
class Estimate:
    """The mean of n values and its two-sided interval, both ends None where one value is all there is."""

    n: int
    mean: float
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero; False without an interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate | None:
    """mean ± t_{n-1, (1 + level)/2} s / sqrt(n), s the sample's standard deviation (over n - 1); None for no values."""
    n = len(values)
    if n == 0:
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(1, mean, None, None)
    half = _t_quantile((1 + level) / 2, n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(n, mean, mean - half, mean + half)


def paired_percent(values: Mapping[Key, float], base: Mapping[Key, float]) -> dict[Key, float]:
    """100 (a/b - 1) for every key (a seed, say) that has both, in the order of `values`."""
    return {key: 100.0 * (value / base[key] - 1.0) for key, value in values.items() if key in base}


def p_value(differences: Sequence[float]) -> float | None:
    """Two-sided p of Student's t test that the mean difference is zero.

    None for fewer than two differences and for equal ones, which have no variance to test against.
    """
    n = len(differences)
    if n < 2:
        return None
    deviation = statistics.stdev(differences)
    if deviation == 0:
        return None
    from scipy import stats  # takes most of a second, so only where a test is made

    t = math.fsum(differences) / n / (deviation / math.sqrt(n))
    return float(2 * stats.t.sf(abs(t), n - 1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values adjusted for their number by Holm's step-down method; None stays None and does not count."""
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        adjusted[index] = largest
    return adjusted


def outliers(values: Sequence[float]) -> list[bool] | None:
    """Which values are outliers: |0.6745 (x - median) / MAD| > 3.5; None for fewer than 5, where none can be told.

    MAD is the median absolute deviation from the median. Where more than half of the values agree it is 0, and
    (x - median) / (1.2533 * mean absolute deviation) takes its place.
    """
    if len(values) < OUTLIER_MIN:
        return None
    median = statistics.median(values)
    deviations = [abs(value - median) for value in values]
    spread = statistics.median(deviations) / 0.6745 or 1.2533 * statistics.fmean(deviations)
    return [deviation > OUTLIER_Z * spread for deviation in deviations]


def _t_quantile(probability: float, degrees: int) -> float:
    from scipy import stats  # takes most of a second, so only where an interval is wanted

    return float(stats.t.ppf(probability, degrees))
