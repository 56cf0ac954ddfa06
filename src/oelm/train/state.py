"""What a run saves to resume exactly, apart from tensors."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from oelm.strict import Strict
from oelm.train.device import Compute


class TrainState(Strict):
    """The position of a run. Batch order and dropout noise are functions of (seed, step), so they are not saved."""

    step: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)
    evaluated_step: int = Field(default=0, ge=0)
    best_value: float | None = None
    best_step: int | None = None
    loss_scale: dict[str, int | float] = {}

    def advanced(self, *, tokens: int) -> TrainState:
        return self.model_copy(update={"step": self.step + 1, "tokens": self.tokens + tokens})

    def evaluated(self, value: float) -> TrainState:
        """Return the state after an evaluation at this step; less is better, and the first of equals is the best."""
        update: dict[str, Any] = {"evaluated_step": self.step}
        if self.best_value is None or value < self.best_value:
            update |= {"best_value": value, "best_step": self.step}
        return self.model_copy(update=update)

    @property
    def is_best_here(self) -> bool:
        """Whether the best evaluation so far is that of this step."""
        return self.best_step == self.step


class SavedState(Strict):
    """`state.json` of a checkpoint: the position, and what it was computed with."""

    state: TrainState
    clock: dict[str, float]
    frozen: dict[str, str]
    data_fingerprint: str
    tokenizer_sha256: str
    environment: dict[str, str]
    # Empty in old checkpoints.
    software: dict[str, str] = {}
    run: str = ""
    config: dict[str, Any] = {}
    energy_j: dict[str, float] = {}


def environment(compute: Compute, *, processes: int = 1) -> dict[str, str]:
    """Return what decides the low bits of a computation; a change is reported on resume."""
    return {
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if compute.device == "cuda" else compute.device,
        "precision": compute.precision,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "processes": str(processes),
    }


def software() -> dict[str, str]:
    """Return the versions of the code; a change is reported on resume, as it may change more than low bits."""
    return {"oelm": version("oelm"), "source": source_revision() or "unknown", "python": platform.python_version()}


@functools.cache
def source_revision() -> str | None:
    """Return the git commit of the package's own checkout, marked when files differ from it; None outside of one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--", "src"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
