"""Interleaved comparison: contenders take turns in one process, so that what disturbs one disturbs all."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom; beyond that the normal one serves.
_T95 = (
    (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    + (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)
    + (2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
)


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one contender is as another, with a 95% interval from the rounds' paired ratios."""

    value: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.value:.3f}x [{self.low:.3f}, {self.high:.3f}]"


def interleave(contenders: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Run every contender once per round, in an order that reverses each round; return seconds, warm-up left out."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-warmup, rounds):
        # A-B-B-A: a machine that slows down steadily favours nobody.
        for name in list(contenders) if number % 2 else reversed(list(contenders)):
            started = time.perf_counter()
            contenders[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def speed_ratio(ours: list[float], theirs: list[float]) -> Ratio:
    """Return theirs over ours, as the geometric mean of the rounds' ratios with a t interval on their logarithms."""
    logs = [math.log(their / our) for our, their in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(mean), 0.0, math.inf, len(logs))
    quantile = _T95[len(logs) - 2] if len(logs) - 2 < len(_T95) else 1.960
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))
