"""The device and precision of a run, and whether its memory and disk suffice: an estimate before it starts."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oelm.config import Device, FinetuneConfig, Precision, RunConfig, TrainConfig
from oelm.data.example_sets import ExampleMeta
from oelm.errors import ConfigError, DiskFullError, OutOfMemoryError
from oelm.models.shape import chunk_rows
from oelm.runs.layout import CHECKPOINTS


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
    # Only where it changes something: the call loads torch's compiler.
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def gpu_uuid(device: str) -> str | None:
    """Return the UUID of the GPU in use, as NVML names it; None without a GPU."""
    if device != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return None if uuid is None else f"GPU-{uuid}"


_FLOAT = 4
_OOM_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Estimate:
    """Bytes a run will need at its peak, and bytes its checkpoints will take."""

    memory: int
    disk: int
    checkpoint: int


def parameter_counts(config: RunConfig) -> tuple[int, int]:
    """Return how many parameters a run's model has, and how many of them train at some time."""
    counts = config.weight_counts()
    if config.method.thaw:
        # What is frozen at first needs its gradient and its optimizer's state later, and slices become weights.
        whole = counts.total + counts.selected
        return whole, whole
    return counts.total, counts.trainable


def estimate(config: RunConfig, *, device: str) -> Estimate:
    """Estimate memory and disk of a run from its shape and its method."""
    model, batch = config.model, config.micro_batch_size
    total, trainable = parameter_counts(config)
    tokens = batch * model.seq_len
    states = total * _FLOAT + trainable * 3 * _FLOAT
    # Kept for the backward pass per token and layer: two norms, q k v, mixed values, two adds and the feed-forward.
    per_layer = tokens * (9 * model.model_dim + 2 * model.ff_dim)
    if model.dropout > 0 and device == "cpu":
        # Masks, and the attention probabilities four times: on a CPU no fast path supports dropout.
        per_layer += tokens * 2 * model.model_dim + 4 * batch * model.num_heads * model.seq_len**2
    head = 2 * chunk_rows(model.vocab_size) * model.vocab_size + 2 * model.vocab_size * model.model_dim
    checkpoint = (total + 2 * trainable) * _FLOAT
    memory = states + (per_layer * model.num_layers + head + 4 * tokens * model.model_dim) * _FLOAT
    # The kept ones, the best, and the one being written.
    return Estimate(memory=memory, disk=checkpoint * (config.keep_checkpoints + 2), checkpoint=checkpoint)


def classifier_estimate(facts: dict[str, Any], config: FinetuneConfig, examples: ExampleMeta) -> Estimate:
    """Estimate memory and disk of a classifier's run from its model's config.json, whose names differ by architecture."""
    width = _fact(facts, "hidden_size", "model_dim", "dim", "d_model", "n_embd", default=768)
    heads = _fact(facts, "num_attention_heads", "num_heads", "n_heads", "n_head", "encoder_attention_heads", default=12)
    # In T5 the heads need not add up to the width.
    attended = heads * _fact(facts, "d_kv", default=width // heads)
    inner = _fact(facts, "intermediate_size", "ff_dim", "hidden_dim", "d_ff", "encoder_ffn_dim", default=4 * width)
    is_gated = "gated" in str(facts.get("feed_forward_proj"))
    longest = max(split.longest for split in examples.splits.values())
    batch, total, kept = config.micro_batch_size, 0, 0
    # The second attention of a decoder layer attends to the encoder.
    for attentions, layers in enumerate(_num_layers(facts), start=1):
        matrices = attentions * 4 * width * attended + (3 if is_gated else 2) * width * inner
        total += layers * (matrices + (6 * attentions + 3) * width + inner)
        # What autograd saves in BERT, T5 and BART with dropout, measured and rounded up.
        per_token = (6 + 4 * attentions) * width + 4 * attentions * attended + (8 if is_gated else 3) * inner
        kept += layers * (batch * longest * per_token + 4 * attentions * batch * heads * longest**2)
    vocab = _fact(facts, "vocab_size", default=examples.vocab_size)
    positions = _fact(facts, "max_position_embeddings", "n_positions", default=examples.max_length)
    # Positions of both halves; the layers on top are matrices as wide as the model.
    total += (vocab + 2 * positions + 2 * width) * width
    checkpoint = 3 * total * _FLOAT
    return Estimate(memory=(4 * total + kept) * _FLOAT, disk=checkpoint * (config.keep_checkpoints + 2), checkpoint=checkpoint)


def _fact(facts: dict[str, Any], *names: str, default: int) -> int:
    return next((int(facts[name]) for name in names if facts.get(name)), default)


def _num_layers(facts: dict[str, Any]) -> tuple[int, int]:
    """Return how many layers have one attention and how many have two (the decoder's)."""
    layers = _fact(facts, "num_hidden_layers", "num_layers", "n_layers", "n_layer", "encoder_layers", default=12)
    if not facts.get("is_encoder_decoder", facts.get("model_type") in ("t5", "bart")):
        return layers, 0
    return layers, _fact(facts, "num_decoder_layers", "decoder_layers", default=layers)


def check_fits(needs: Estimate, config: TrainConfig, *, run: Path, device: str) -> None:
    """Raise OutOfMemoryError or DiskFullError if the run clearly needs more than is free."""
    free_memory = available_memory(device)
    if free_memory is not None and needs.memory > free_memory:
        raise OutOfMemoryError(
            f"this run needs about {gibibytes(needs.memory)} of memory and {gibibytes(free_memory)} are free: "
            f"{what_to_lower(config)}, or start anyway with --no-preflight"
        )
    there = sum(path.stat().st_size for path in run.glob(f"{CHECKPOINTS}/step-*/*"))
    free_disk = shutil.disk_usage(run).free
    if needs.disk - there > free_disk:
        raise DiskFullError(
            f"{run}: checkpoints of this run take about {gibibytes(needs.disk)} and {gibibytes(free_disk)} are free on "
            "that disk: make room, choose another --out, or start anyway with --no-preflight"
        )


def available_memory(device: str) -> int | None:
    """Return the bytes that are free on the device; None if unknown."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    if device == "cpu" and Path("/proc/meminfo").exists():
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def what_to_lower(config: TrainConfig) -> str:
    """Return which setting to lower first and to what, preferring one that does not change the result."""
    size = config.micro_batch_size
    if size > 1:
        smaller = next(n for n in range(size // 2, 0, -1) if config.batch_size % n == 0)
        return f"lower micro_batch_size from {size} to {smaller} (same batch, more accumulation)"
    if not isinstance(config, RunConfig):
        return "lower examples.max_length, or take a smaller model"
    return f"lower model.seq_len ({config.model.seq_len}), model.model_dim ({config.model.model_dim}) or the vocabulary"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that an allocation failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OOM_WORDS)


def gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 // 10 else f"{count / 2**20:.0f} MiB"
