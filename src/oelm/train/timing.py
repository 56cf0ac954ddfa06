"""Where the time goes: a clock that charges every second to one phase, and statistics of the steps."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

PHASES = ("step", "data", "validation", "checkpoint", "other")
# Steps slower than this many medians (another process woke up, a laptop slept) are left out of the mean.
OUTLIER_MEDIANS = 3.0


class Clock:
    """Seconds by phase, over all sittings of a run; what is in no phase is 'other', so that the sum is the wall time."""

    def __init__(self, earlier: dict[str, float]) -> None:
        self._seconds = {phase: earlier.get(phase, 0.0) for phase in PHASES}
        self._mark = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge("other")
        try:
            yield
        finally:
            self._charge(name)

    def seconds(self) -> dict[str, float]:
        """Return the seconds charged so far by phase, all time up to now included."""
        self._charge("other")
        return dict(self._seconds)

    def _charge(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._mark
        self._mark = now


def step_statistics(step_seconds: Sequence[float], *, warmup_steps: int) -> dict[str, Any]:
    """Summarise step times after the first `warmup_steps` (or a tenth of them all, where the run is shorter)."""
    skipped = min(warmup_steps, len(step_seconds) // 10)
    measured = sorted(step_seconds[skipped:])
    if not measured:
        return {"measured_steps": 0, "warmup_steps": skipped}
    median = statistics.median(measured)
    kept = [value for value in measured if value <= OUTLIER_MEDIANS * median]
    return {
        "measured_steps": len(measured),
        "warmup_steps": skipped,
        "outliers": len(measured) - len(kept),
        "mean": statistics.fmean(kept),
        "median": median,
        "std": statistics.stdev(kept) if len(kept) > 1 else 0.0,
        "min": measured[0],
        "max": measured[-1],
        "p95": measured[math.ceil(0.95 * len(measured)) - 1],
        "p99": measured[math.ceil(0.99 * len(measured)) - 1],
    }
