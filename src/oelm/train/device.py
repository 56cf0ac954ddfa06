"""Choose the device and precision of a run from what the machine offers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oelm.config import Device, Precision
from oelm.errors import ConfigError


@dataclass(frozen=True)
class Capabilities:
    """What this machine offers."""

    cuda: bool
    mps: bool
    cuda_bf16: bool


@dataclass(frozen=True)
class Compute:
    """The chosen device and precision, with the reason for the precision."""

    device: str
    precision: str
    reason: str

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Run the block's products in the chosen precision; weights stay float32."""
        if self.autocast_dtype is None:
            yield
        else:
            with torch.autocast(self.device, dtype=self.autocast_dtype):
                yield


def capabilities() -> Capabilities:
    """Ask torch what this machine offers."""
    cuda = torch.cuda.is_available()
    return Capabilities(
        cuda=cuda,
        mps=torch.backends.mps.is_available(),
        cuda_bf16=cuda and torch.cuda.is_bf16_supported(including_emulation=False),
    )


def choose_compute(device: Device, precision: Precision, has: Capabilities | None = None) -> Compute:
    """Choose device and precision; raise ConfigError for what the machine cannot do. `has` defaults to this machine."""
    has = has or capabilities()
    if (device == "cuda" and not has.cuda) or (device == "mps" and not has.mps):
        there = [name for name, present in (("cuda", has.cuda), ("mps", has.mps), ("cpu", True)) if present]
        raise ConfigError(f"device '{device}' is not available here; available: {', '.join(there)}, or 'auto'")
    chosen = device if device != "auto" else "cuda" if has.cuda else "mps" if has.mps else "cpu"
    if precision == "fp16" and chosen == "cpu":
        raise ConfigError("precision 'fp16' needs a GPU; use 'auto' or 'float32' on a CPU")
    if precision == "bf16" and chosen == "cuda" and not has.cuda_bf16:
        raise ConfigError("precision 'bf16' is not supported by this GPU; use 'fp16', or 'auto' which chooses it")
    if precision != "auto":
        return Compute(chosen, precision, "asked for")
    if chosen == "cuda" and has.cuda_bf16:
        return Compute(chosen, "bf16", "this GPU computes bfloat16")
    if chosen == "cuda":
        return Compute(chosen, "fp16", "this GPU computes float16 but not bfloat16")
    return Compute(chosen, "float32", "mixed precision is slower or untested on this device")


def synchronize(device: str) -> None:
    """Wait until the device has finished, so that a clock read next counts finished work."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


def device_name(device: str) -> str:
    """Return the device by the machine's number; torch numbers only the GPUs that the launcher made visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"cuda:{visible.split(',')[0] or 0}" if device == "cuda" else device


def apply_determinism(*, deterministic: bool) -> None:
    """Make a GPU bit-reproducible if asked for; a CPU is anyway."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses without it
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def gpu_uuid(device: str) -> str | None:
    """Return the UUID of the GPU in use, as NVML names it; None without a GPU."""
    if device != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"
