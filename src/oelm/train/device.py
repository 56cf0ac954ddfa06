"""Which device and precision a run uses, and why: pure decisions over what the machine says it can do."""

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
    """The device and precision in force, with the reason for the precision."""

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


def look() -> Capabilities:
    """Ask torch what this machine offers."""
    cuda = torch.cuda.is_available()
    return Capabilities(
        cuda=cuda,
        mps=torch.backends.mps.is_available(),
        cuda_bf16=cuda and torch.cuda.is_bf16_supported(including_emulation=False),
    )


def choose_compute(device: Device, precision: Precision, has: Capabilities) -> Compute:
    """Decide device and precision; refuse what the machine cannot do rather than fall back in silence."""
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
    """Wait for the device, so that a clock read next counts finished work."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


def device_name(device: str) -> str:
    """Return the device as the machine counts it: a launcher shows its run one GPU only, which is 0 to torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"cuda:{visible.split(',')[0] or 0}" if device == "cuda" else device


def apply_determinism(*, deterministic: bool) -> None:
    """Make a GPU repeat itself to the bit where asked for; a CPU does so anyway."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses without it
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def gpu_uuid(device: str) -> str | None:
    """Return the GPU in use as NVML names it, whatever a launcher shows its run as number 0; None without one."""
    if device != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"
