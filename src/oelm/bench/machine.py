"""What a machine is, how fast it multiplies matrices, and the peak memory of one training step."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import resource
import shutil
import sys
import time
from pathlib import Path

import torch

from oelm.files import cache_root
from oelm.train.device import available_memory, choose_compute, gibibytes, synchronize

_EXTRAS = {
    "hf": ("transformers",),
    "data": ("datasets", "tiktoken"),
    "report": ("scipy", "altair", "vl_convert", "jinja2"),
    "gpu": ("pynvml",),
    "track": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
_PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SIZE = 1024


def examine() -> dict[str, str]:
    """Return what a run would use here, by name."""
    compute = choose_compute("auto", "auto")
    memory = available_memory(compute.device)
    disk = shutil.disk_usage(Path.cwd()).free
    return {
        "oelm": importlib.metadata.version("oelm"),
        "python, torch": f"{platform.python_version()}, {torch.__version__}",
        "device": torch.cuda.get_device_name() if compute.device == "cuda" else compute.device,
        "precision": f"{compute.precision}: {compute.reason}",
        "threads": f"{torch.get_num_threads()} (set OMP_NUM_THREADS to change), {torch.backends.cpu.get_cpu_capability()}",
        "memory free": gibibytes(memory) if memory is not None else "unknown",
        "disk free here": gibibytes(disk),
        "cache": str(cache_root()),
        "SLURM": "jobs can be submitted from here" if shutil.which("sbatch") else "not found",
        "extras": ", ".join(f"{name}: {_extra_state(modules)}" for name, modules in _EXTRAS.items()),
    }


def _extra_state(modules: tuple[str, ...]) -> str:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return f"missing {' '.join(missing)}" if missing else "yes"


def matmul_speeds(seconds: float) -> dict[str, str]:
    """Return each precision's speed on the chosen device, sharing `seconds` among them."""
    device = choose_compute("auto", "auto").device
    return {name: _matmul_speed(dtype, device, seconds / len(_PRECISIONS)) for name, dtype in _PRECISIONS.items()}


def _matmul_speed(dtype: torch.dtype, device: str, seconds: float) -> str:
    try:
        size = _SIZE
        left = torch.ones(size, size, dtype=dtype, device=device)
        # A slow precision must not take minutes: start small.
        small = left[:128, :128].contiguous()
        started = time.perf_counter()
        _ = small @ small
        synchronize(device)
        if (time.perf_counter() - started) * (size / 128) ** 3 > seconds:
            left, size = small, 128
        started, count = time.perf_counter(), 0
        while count < 3 or time.perf_counter() - started < seconds * 0.8:
            _ = left @ left
            synchronize(device)
            count += 1
        rate = count * 2 * size**3 / (time.perf_counter() - started)
    except RuntimeError as problem:
        return f"not supported ({str(problem).splitlines()[0]})"
    return f"{rate / 1e9:,.1f} GFLOP/s"


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
    from oelm.bench.interleave import training_step
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
