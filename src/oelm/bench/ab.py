"""Interleaved comparison: contenders take turns in one process, so that a disturbance affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from oelm.intervals import Ratio, mean_ratio


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


@dataclass(frozen=True)
class Timed:
    """A contender's median, and how many times as fast it is as the reference."""

    median_s: float
    ratio: Ratio


def against(reference: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, Timed]:
    """Return every contender of an interleaved timing against one of them."""
    return {name: Timed(statistics.median(values), mean_ratio(seconds[reference], values)) for name, values in seconds.items()}


def inverse(ratio: Ratio) -> Ratio:
    """Return the ratio the other way round: exact, because it is a mean of logarithms."""
    return Ratio(1 / ratio.value, 1 / ratio.high, 1 / ratio.low, ratio.count)
