"""Interleaved comparison: contenders take turns in one process, so that what disturbs one disturbs all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


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
