"""`oelm bench`: two configs' training steps side by side: time, memory, bytes, and what arithmetic allows."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from oelm.bench.ab import interleave
from oelm.errors import OelmError
from oelm.files import dump_json
from oelm.intervals import Ratio, mean_ratio
from oelm.method.apply import freeze
from oelm.method.audit import Audit, audit
from oelm.models.flops import MethodWork, method_work
from oelm.models.gpt import build_gpt
from oelm.train.config import RunConfig
from oelm.train.device import choose_compute, look, synchronize
from oelm.train.dist import ALONE, World
from oelm.train.loss import mean_cross_entropy
from oelm.train.optim import build_optimizer
from oelm.train.preflight import estimate
from oelm.train.step import train_step

# Where arithmetic expects less of a difference than this, nobody wants to see one.
_ALIKE = 0.005


@dataclass(frozen=True)
class Side:
    """One contender: its median step, peak memory, and the bytes that follow from what it trains."""

    name: str
    median_s: float
    peak_bytes: int
    optimizer_bytes: int
    checkpoint_bytes: int
    all_reduced_bytes: int


@dataclass(frozen=True)
class Comparison:
    """Two contenders; `ratio` says how many times as fast the second is, `bound` what arithmetic allows at most."""

    first: Side
    second: Side
    ratio: Ratio
    bound: float


def compare(
    first: tuple[str, RunConfig], second: tuple[str, RunConfig], *, rounds: int, progress: Callable[[str], None]
) -> Comparison:
    """Measure two configs: steps in turn in one process, memory each in a process of its own."""
    names = (f"A {first[0]}", f"B {second[0]}")
    configs = dict(zip(names, (first[1], second[1]), strict=True))
    progress(f"timing {rounds} rounds of A and B in turn, after 2 to warm up")
    seconds = interleave({name: training_step(config) for name, config in configs.items()}, rounds=rounds, warmup=2)
    sides = []
    for name, config in configs.items():
        progress(f"measuring the memory of {name}")
        sides.append(_side(name, config, statistics.median(seconds[name])))
    return Comparison(sides[0], sides[1], mean_ratio(seconds[names[0]], seconds[names[1]]), _bound(first[1], second[1]))


def _side(name: str, config: RunConfig, median_s: float) -> Side:
    report = _audit(config)
    return Side(
        name=name,
        median_s=median_s,
        peak_bytes=peak_memory(config),
        optimizer_bytes=8 * report.trainable,
        checkpoint_bytes=estimate(config, device="cpu").checkpoint,
        # DDP sums every gradient once a step, in float32; what is frozen has none.
        all_reduced_bytes=4 * report.trainable,
    )


def _audit(config: RunConfig) -> Audit:
    model = build_gpt(config.model, seed=0)
    freeze(model, config.method, seed=0)
    return audit(model)


def _bound(first: RunConfig, second: RunConfig) -> float:
    return _work(first).total / _work(second).total


def _work(config: RunConfig) -> MethodWork:
    """Return the operations of a config's first step, without those that its method leaves out."""
    method, depth = config.method, config.model.num_layers
    rows = ALONE.micro_batch_size(config.batch_size, config.micro_batch_size)
    return method_work(
        config.model,
        method,
        batch_size=config.batch_size,
        micro_batches=config.batch_size // rows,
        layers=[layer for layer in range(depth) if method.selects(layer, depth)],
        learn_layers=[layer for layer in range(depth) if method.learns_in(layer, depth)],
    )


def training_step(config: RunConfig, *, world: World = ALONE) -> Callable[[], None]:
    """Return one whole training step of a config on random tokens, ready to be called again and again.

    In a world of several processes it is this one's share of the batch, and the sum of gradients.
    """
    compute = choose_compute(config.device, config.precision, look())
    model = build_gpt(config.model, seed=config.seed)
    freeze(model, config.method, seed=config.seed)
    model.to(compute.device)
    optimizer = build_optimizer(model, config.optim, device=compute.device)
    scaler = torch.amp.GradScaler(compute.device, enabled=compute.precision == "fp16")
    forward = world.wrap(torch.compile(model) if config.compile else model)  # type: ignore[arg-type]
    size = world.micro_batch_size(config.batch_size, config.micro_batch_size)
    shape = (size, config.model.seq_len + 1)
    windows = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(compute.device)

    def loss(micro_batch: int) -> torch.Tensor:
        with compute.autocast():
            hidden = forward(windows[:, :-1]).flatten(0, 1)
            return mean_cross_entropy(hidden, model.head_VD, windows[:, 1:].flatten())

    def step() -> None:
        train_step(
            loss,
            model,
            optimizer,
            scaler,
            num_micro_batches=config.batch_size // size,
            clip_norm=config.optim.clip_norm,
            noise_seed=0,
            batch_ids=[],
            step=0,
            world=world,
            forward=forward,
        )
        synchronize(compute.device)

    return step


def peak_memory(config: RunConfig) -> int:
    """Return by how many bytes two steps grow a process of their own beyond its imports."""
    command = [sys.executable, "-m", "oelm.bench.peak"]
    child = subprocess.run(command, input=dump_json(config.as_dict()), capture_output=True, text=True)
    if child.returncode:
        raise OelmError(f"measuring memory failed: {child.stderr.strip().splitlines()[-1:]}")
    return int(json.loads(child.stdout)["bytes"])


def verdict(comparison: Comparison) -> str:
    """Return a sentence that says what the interval means, and when it means nothing."""
    ratio, bound = comparison.ratio, comparison.bound
    allowed = f"arithmetic allows at most {bound:.3f}x" if bound >= 1 else f"arithmetic expects {bound:.3f}x"
    a, b = comparison.first.name, comparison.second.name
    if abs(bound - 1) > _ALIKE and ratio.low <= min(1.0, bound) and ratio.high >= max(1.0, bound):
        return (
            f"This machine is too noisy to tell {b} from {a}: the interval holds both no difference and the bound; {allowed}. "
            "Give more --rounds or a quieter machine."
        )
    if ratio.low > 1:
        beyond = ", so what lies beyond is noise" if ratio.high > bound >= 1 else ""
        gain = f"{100 * (ratio.low - 1):.1f}% to {100 * (ratio.high - 1):.1f}%"
        return f"{b} is faster than {a}, by {gain}; {allowed}{beyond}."
    if ratio.high < 1:
        return f"{b} is slower than {a}, by {100 * (1 - ratio.high):.1f}% to {100 * (1 - ratio.low):.1f}%; {allowed}."
    return f"No difference between {b} and {a} shows: between {ratio.low:.3f}x and {ratio.high:.3f}x as fast; {allowed}."
