"""Student's t for a handful of paired differences; the standard library has the normal distribution only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

_BISECTIONS = 60


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and the ends of its confidence interval, from ``n`` values."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def mean_interval(values: Sequence[float], *, alpha: float) -> Interval:
    """Of the mean at confidence 1 - ``alpha``, two-sided; a single value has no spread."""
    assert len(values) > 1
    mean = fmean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    reach = quantile(1 - alpha / 2, len(values) - 1) * math.sqrt(variance / len(values))
    return Interval(mean=mean, low=mean - reach, high=mean + reach, n=len(values))


@lru_cache(maxsize=256)
def quantile(p: float, degrees: int) -> float:
    """The value below which a t variable of so many degrees of freedom lies with probability ``p`` >= 1/2."""
    low, high = 0.0, 1.0
    while _cdf(high, degrees) < p:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _cdf(middle, degrees) < p else (low, middle)
    return high


def _cdf(t: float, degrees: int) -> float:
    """For whole degrees of freedom, t >= 0 (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + within) / 2
