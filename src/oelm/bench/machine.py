"""What a machine is, how fast it multiplies matrices, whether runs on it keep their promises, and a step's peak memory."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oelm.config import Precision
from oelm.errors import ConfigError, OelmError
from oelm.files import cache_root, read_as, sha256_file
from oelm.method.apply import freeze
from oelm.method.audit import assert_unmoved
from oelm.models.gpt import build_gpt
from oelm.runs.layout import MANIFEST, METRICS, SAVED_MODEL, SAVED_OPTIMIZER, TIMING
from oelm.runs.metrics import read_metrics
from oelm.runs.records import Figures, Manifest, checkpoint_folders, saved_step
from oelm.train.device import available_memory, choose_compute, gibibytes, synchronize
from oelm.train.load import load_run

_EXTRAS = {
    "hf": ("transformers", "accelerate"),
    "data": ("datasets", "tiktoken"),
    "report": ("altair", "vl_convert"),
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


# The self-test's runs: a second or more on a GPU, so that one can be killed between its second checkpoint and its third.
_STEPS, _SAVED_EVERY, _KILLED_AFTER = 90, 20, 50
_BATCH, _TOKENS = 8, 128
_SETTINGS = {
    "model.model_dim": 128,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.ff_dim": 512,
    "model.seq_len": _TOKENS,
    "model.dropout": 0.1,
    "batch_size": _BATCH,
    "micro_batch_size": _BATCH // 2,
    "eval_every": 45,
    "save_every": _SAVED_EVERY,
    "timing_warmup_steps": 10,
    "deterministic": "true",
}
_LONGEST_S = 600
# How far losses may be apart: sums in another order, and products in another precision.
_OTHER_ORDER, _OTHER_PRECISION = 1e-4, 0.02


@dataclass(frozen=True)
class Check:
    """One promise, whether it was kept here, and what was found."""

    name: str
    holds: bool
    found: str


def selftest(tell: Callable[[str], None]) -> list[Check]:
    """Train, kill, resume and spread small runs on this machine, in processes of their own; about two minutes on a CPU."""
    promises = {
        "trains": _trains,
        "killed, resumes bit-exactly": _resumes,
        "frozen weights stay": _stays_frozen,
        "precision": _precisions,
        "two processes": _ranks,
        "speed": _speed,
    }
    checks = []
    with tempfile.TemporaryDirectory(prefix="oelm-selftest-") as folder:
        root = Path(folder)
        # Text that every Python carries, and that no such run learns whole: a loss that has settled compares nothing.
        (root / "text.txt").write_text("".join(inspect.getsource(module) for module in (argparse, inspect, typing)))
        for name, promise in promises.items():
            tell(name)
            try:
                checks.append(Check(name, *promise(root)))
            except (OelmError, OSError) as problem:
                checks.append(Check(name, False, str(problem)))
    return checks


def _command(run: Path, *more: str, launcher: Sequence[str] = ("-m",)) -> list[str]:
    settings = [part for name, value in _SETTINGS.items() for part in ("--set", f"{name}={value}")]
    what = ["train", "--budget", "smoke", "--method", "oelm_freeze", "--text", str(run.parent / "text.txt")]
    length = ["--steps", str(_STEPS), "--out", str(run)]
    return [sys.executable, *launcher, "oelm", *what, *length, *settings, *more]


def _environment(run: Path) -> dict[str, str]:
    # One cache for all of it, deleted in the end.
    return {**os.environ, "OELM_CACHE": str(run.parent / "cache")}


def _finish(run: Path, command: list[str]) -> list[float]:
    """Bring a run to its end and return the losses of its steps."""
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        child = subprocess.run(command, env=_environment(run), cwd=run.parent, timeout=_LONGEST_S, **pipes)
    except subprocess.TimeoutExpired:
        raise OelmError(f"the run did not end within {_LONGEST_S} s") from None
    if child.returncode:
        last = (child.stderr.strip() or child.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise OelmError(f"exit code {child.returncode}: {last}")
    return _losses(run)


def _losses(run: Path) -> list[float]:
    losses = [float(row["loss"]) for row in read_metrics(run / METRICS) if "loss" in row]
    if not losses:
        raise OelmError("not checked: the run before it recorded no step")
    return losses


def _setting(run: Path) -> dict[str, str]:
    """Return with what a run was computed, as it recorded it."""
    return read_as(Manifest, run / MANIFEST).environment


def _trains(root: Path) -> tuple[bool, str]:
    losses = _finish(root / "whole", _command(root / "whole"))
    return losses[-1] < losses[0], f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {len(losses)}"


def _resumes(root: Path) -> tuple[bool, str]:
    run = root / "killed"
    quiet = subprocess.DEVNULL
    with subprocess.Popen(_command(run), env=_environment(run), cwd=root, stdout=quiet, stderr=quiet) as child:
        try:
            deadline = time.monotonic() + _LONGEST_S
            while child.poll() is None and time.monotonic() < deadline and _num_rows(run) < _KILLED_AFTER:
                time.sleep(0.002)
        finally:
            child.kill()
    if child.returncode != -signal.SIGKILL:
        return False, f"the run ended with exit code {child.returncode} before it could be killed"
    step, saved = _num_rows(run), saved_step(run)
    losses = _finish(run, _command(run))
    whole = root / "whole"
    differing = [] if losses == _losses(whole) else ["losses"]
    for name in (SAVED_MODEL, SAVED_OPTIMIZER):
        ours, theirs = (sha256_file(checkpoint_folders(each)[0] / name) for each in (run, whole))
        differing += [] if ours == theirs else [name]
    text = f"killed after step {step}, resumed from step {saved}: "
    return not differing, text + (f"{', '.join(differing)} differ" if differing else "losses, weights and optimizer are equal")


def _num_rows(run: Path) -> int:
    return (run / METRICS).read_bytes().count(b'"loss"') if (run / METRICS).exists() else 0


def _stays_frozen(root: Path) -> tuple[bool, str]:
    loaded = load_run(root / "killed", which="latest")
    assert_unmoved(loaded.model)
    start = build_gpt(loaded.config.model, seed=loaded.config.seed)
    freeze(start, loaded.config.method, seed=loaded.config.seed)
    frozen, odd = 0, []
    for name, weight in loaded.model.named_parameters():
        frozen += not weight.requires_grad
        # What is frozen must be as drawn, and all else must have moved.
        if torch.equal(weight.cpu(), start.get_parameter(name)) == weight.requires_grad:
            odd.append(name)
    text = f"{frozen} tensors of Q and K are as drawn, by sha256 and by value; all others moved"
    return not odd, f"frozen but moved, or never trained: {', '.join(odd)}" if odd else text


def _precisions(root: Path) -> tuple[bool, str]:
    whole = _losses(root / "whole")
    auto = _setting(root / "whole")["precision"]
    final, odd = {auto: whole[-1]}, []
    others: tuple[Precision, ...] = ("float32", "bf16", "fp16")
    for other in others:
        try:
            choose_compute("auto", other)
        except ConfigError:
            continue
        if other != auto:
            losses = _finish(root / other, _command(root / other, "--set", f"precision={other}"))
            final[other] = losses[-1]
            odd += [other] if _setting(root / other)["precision"] != other or losses == whole else []
    apart = max(abs(loss / final["float32"] - 1) for loss in final.values())
    shown = ", ".join(f"{name} {loss:.4f}" for name, loss in final.items())
    changed = f"; the same bits in {' and '.join(odd)}" if odd else ""
    return apart <= _OTHER_PRECISION and not odd, f"auto is {auto}; last losses: {shown}, {100 * apart:.2f}% apart{changed}"


def _ranks(root: Path) -> tuple[bool, str]:
    whole, chosen = _losses(root / "whole")[-1], choose_compute("auto", "auto")
    # One GPU cannot serve two processes of NCCL, and MPS has no such library.
    device = "cuda" if chosen.device == "cuda" and torch.cuda.device_count() > 1 else "cpu"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    last = _finish(root / "two", _command(root / "two", "--set", f"device={device}", launcher=launcher))[-1]
    apart, processes = abs(last / whole - 1), _setting(root / "two")["processes"]
    is_same = device == chosen.device and chosen.precision == "float32"
    text = f"{processes} processes on {device} ({'nccl' if device == 'cuda' else 'gloo'}): last loss {last:.4f}, "
    holds = processes == "2" and apart <= (_OTHER_ORDER if is_same else _OTHER_PRECISION)
    return holds, f"{text}{100 * apart:.4f}% from one process"


def _speed(root: Path) -> tuple[bool, str]:
    step = read_as(Figures, root / "whole" / TIMING).step_s.median
    if not step:
        return False, "no step was measured"
    return (
        True,
        f"{_BATCH * _TOKENS / step:,.0f} tokens/s, median step {1000 * step:.1f} ms (4 layers, 128 wide, batch 8 x 128)",
    )


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
