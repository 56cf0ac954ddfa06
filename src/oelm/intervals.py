"""Student's t interval of a mean, without a statistics library."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the normal one and its first correction.
T95 = (
    (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    + (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
    + (2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
)
# The largest power whose exponential is a float.
_MAX_POWER = 709.0


def exp_or_inf(power: float) -> float:
    """Return e to a power; infinity where that overflows a float."""
    return math.exp(power) if power <= _MAX_POWER else math.inf


@dataclass(frozen=True)
class Ratio:
    """The geometric mean of paired ratios with its 95% interval; a single pair has an infinite one."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.3f}x [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its 95% interval; a single pair has an infinite one."""

    value: float
    low: float
    high: float
    count: int


def mean_difference(values: Sequence[float], references: Sequence[float]) -> Difference:
    """Return the mean of paired differences with a t interval."""
    differences = [value - reference for value, reference in zip(values, references, strict=True)]
    mean, half = statistics.fmean(differences), _half_width(differences)
    return Difference(mean, mean - half, mean + half, len(differences))


def mean_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the geometric mean of paired ratios with a t interval on their logarithms."""
    logs = [math.log(above / below) for above, below in zip(numerators, denominators, strict=True)]
    mean, half = statistics.fmean(logs), _half_width(logs)
    return Ratio(exp_or_inf(mean), exp_or_inf(mean - half), exp_or_inf(mean + half), len(logs))


def _half_width(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.inf
    freedom = len(values) - 1
    quantile = T95[freedom - 1] if freedom <= len(T95) else 1.960 + 2.37 / freedom
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
