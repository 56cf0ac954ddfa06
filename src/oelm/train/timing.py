"""Time and energy: seconds by phase, statistics of the steps, and joules if the machine measures them."""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

PHASES = ("step", "data", "validation", "checkpoint", "other")
# Slower steps, in medians (another process ran, a laptop slept), are left out of the mean.
OUTLIER_MEDIANS = 3.0
# The energy counters of CPUs (RAPL) on Linux.
POWERCAP = Path("/sys/class/powercap")
# A package, or a zone within one; other drivers (intel-rapl-mmio) repeat the same energy.
_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")
# No CPU package uses more, so a counter wraps around at most once in the time of its range at this power.
_MOST_W = 1000.0


class Clock:
    """Seconds by phase, over all sessions of a run; time outside phases is 'other', so that the sum is the wall time."""

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
        """Return the seconds by phase up to now."""
        self._charge("other")
        return dict(self._seconds)

    def _charge(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._mark
        self._mark = now


def step_statistics(step_seconds: Sequence[float], *, warmup_steps: int) -> dict[str, Any]:
    """Summarise step times after the first `warmup_steps` (in a short run, after a tenth of all)."""
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


class EnergyCounter(Protocol):
    """A counter of energy."""

    def spent_j(self) -> float | None:
        """Return the joules since the last call; None if unknown."""


class RaplCounter:
    """The energy of the machine's CPU packages and memory, for all processes together.

    Raises OSError or ValueError without a counter that we may read.
    """

    def __init__(self, powercap: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        names = sorted(path.name for path in powercap.iterdir() if _ZONE.fullmatch(path.name))
        self._zones = [powercap / name for name in names if _is_counted(powercap / name)]
        if not self._zones:
            raise ValueError(f"{powercap}: no CPU package has an energy counter")
        self._ranges = [_microjoules(zone / "max_energy_range_uj") for zone in self._zones]
        self._clock, self._read_at = clock, clock()
        self._last = [_microjoules(zone / "energy_uj") for zone in self._zones]

    def spent_j(self) -> float | None:
        now, before = self._clock(), self._read_at
        try:
            read = [_microjoules(zone / "energy_uj") for zone in self._zones]
        except (OSError, ValueError):
            return None
        # A counter may have wrapped around twice.
        if any((now - before) * _MOST_W * 1e6 > whole for whole in self._ranges):
            return None
        spent = [(new - old) % whole for new, old, whole in zip(read, self._last, self._ranges, strict=True)]
        self._read_at, self._last = now, read
        return sum(spent) / 1e6


def _is_counted(zone: Path) -> bool:
    """Whether a zone is a package or memory; cores are part of their package, and `psys` is the sum of all."""
    return (zone / "name").read_text(encoding="ascii").strip().startswith(("package-", "dram"))


def _microjoules(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


class NvmlCounter:
    """The energy of one GPU, by NVML. Raises NVML's error if the card does not count it."""

    def __init__(self, nvml: Any, card: Any) -> None:
        self._nvml, self._card = nvml, card
        self._last = int(nvml.nvmlDeviceGetTotalEnergyConsumption(card))

    def spent_j(self) -> float | None:
        try:
            read = int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card))
        except self._nvml.NVMLError:
            return None
        spent, self._last = read - self._last, read
        # Negative: the driver was reloaded, and counts from zero.
        return spent / 1e3 if spent >= 0 else None


def energy_counters(*, gpu_uuid: str | None, powercap: Path | None = None) -> dict[str, EnergyCounter]:
    """Return the counters that we may read: 'cpu', and 'gpu' for the card with this UUID."""
    found: dict[str, EnergyCounter] = {}
    with contextlib.suppress(OSError, ValueError):
        found["cpu"] = RaplCounter(powercap or POWERCAP)
    if gpu_uuid is not None:
        with contextlib.suppress(ImportError):
            import pynvml  # type: ignore[import-untyped]

            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                found["gpu"] = NvmlCounter(pynvml, pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid))
    return found


class Meter:
    """Joules by source over all sessions of a run; a source that was not read throughout is left out."""

    def __init__(self, counters: Mapping[str, EnergyCounter], *, earlier: Mapping[str, float] | None = None) -> None:
        # A source that an earlier session did not count is incomplete.
        self._counters = {name: counter for name, counter in counters.items() if earlier is None or name in earlier}
        self._joules = {name: (earlier or {}).get(name, 0.0) for name in self._counters}

    def continued(self, earlier: Mapping[str, float]) -> Meter:
        """Return a meter that continues from the joules of earlier sessions."""
        return Meter(self._counters, earlier=earlier)

    def joules(self) -> dict[str, float]:
        """Return the joules up to now. Call it every few seconds, before a counter wraps around twice."""
        for name, counter in list(self._counters.items()):
            spent = counter.spent_j()
            if spent is None:
                del self._counters[name], self._joules[name]
            else:
                self._joules[name] += spent
        return dict(self._joules)
