"""Peak memory of one config's training step, alone in this process: `python -m oelm.bench.peak < config.json`."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch


class PeakMeter:
    """Measures how much a process grows from now on: exactly on a GPU and on Linux, elsewhere beyond its peak so far."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif Path("/proc/self/clear_refs").exists():
            # 5 resets VmHWM, the peak so far.
            Path("/proc/self/clear_refs").write_text("5")
        self._before = _status_bytes("VmRSS") or _max_rss()

    def growth_bytes(self) -> int:
        """Return the peak since the start, less the memory at the start."""
        if self._device == "cuda":
            return torch.cuda.max_memory_allocated()
        return (_status_bytes("VmHWM") or _max_rss()) - self._before


def _status_bytes(field: str) -> int | None:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _max_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    """Read a config from standard input, take two steps, print the growth as JSON."""
    from oelm.bench.compare import training_step
    from oelm.config import parse_any
    from oelm.train.device import choose_compute

    config = parse_any(json.load(sys.stdin), where="standard input")
    meter = PeakMeter(choose_compute(config.device, config.precision).device)
    step = training_step(config)
    step()
    step()
    sys.stdout.write(json.dumps({"bytes": meter.growth_bytes()}) + "\n")


if __name__ == "__main__":
    main()
