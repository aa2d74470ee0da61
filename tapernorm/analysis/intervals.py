"""What several values tell: Student's intervals, paired differences, Holm's correction, outliers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scipy.special import nctdtrinc, stdtr, stdtrit

# Iglewicz and Hoaglin (1993): |modified z| above 3.5 is an outlier. Under 5 values the median and the deviations
# from it hang on single values, so that one seed among three can be told from the others in no way.
OUTLIER_Z = 3.5
OUTLIER_MIN = 5

Key = TypeVar("Key")


@dataclass(frozen=True)
class Estimate:
    """The mean of n values, its standard error and 95 % interval; all but the mean None where n is 1."""

    n: int
    mean: float
    error: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero; False without an interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def p(self) -> float | None:
        """Two-sided p of Student's t test that the mean is zero; None without a variance to test against."""
        return 2 * float(stdtr(self.n - 1, -abs(self.mean / self.error))) if self.error else None


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean, s / sqrt(n) with the sample's standard deviation s, and `student`'s interval; None for no values."""
    n = len(values)
    if n < 2:
        return Estimate(1, values[0]) if values else None
    mean, error = math.fsum(values) / n, statistics.stdev(values) / math.sqrt(n)
    return Estimate(n, mean, error, *student(mean, error, n))


def student(mean: float, error: float, n: int) -> tuple[float, float]:
    """mean ± t_{n-1, 0.975} error: the 95 % interval of a mean of n values with this standard error."""
    reach = error * float(stdtrit(n - 1, 0.975))
    return mean - reach, mean + reach


def detectable(spread: float, n: int, power: float = 0.8) -> float | None:
    """The smallest mean that Student's two-sided test at 5 % finds in n values with this probability; None for n < 2.

    spread / sqrt(n) times the noncentrality at which t_{n-1} exceeds its 97.5 % point with probability `power`;
    `spread` is the values' standard deviation, in whose unit the answer is.
    """
    if n < 2:
        return None
    return spread / math.sqrt(n) * float(nctdtrinc(n - 1, 1 - power, stdtrit(n - 1, 0.975)))


def paired_percent(values: Mapping[Key, float], base: Mapping[Key, float]) -> dict[Key, float]:
    """100 (a/b - 1) for every key (a seed) that has both, in the order of `values`."""
    return {key: 100 * (value / base[key] - 1) for key, value in values.items() if key in base}


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
