"""`oelm bench`: training steps of several configs side by side: time, memory, bytes, and what arithmetic allows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import NamedTuple

import torch

from oelm.bench.ab import against, interleave
from oelm.errors import ConfigError, OelmError
from oelm.files import dump_json
from oelm.intervals import Ratio
from oelm.method.apply import freeze
from oelm.models.flops import MethodWork, method_work
from oelm.models.gpt import GPT, build_gpt
from oelm.train.config import RunConfig
from oelm.train.device import choose_compute, look, synchronize
from oelm.train.dist import ALONE, World
from oelm.train.loss import mean_cross_entropy
from oelm.train.optim import build_optimizer, muon_parameters
from oelm.train.preflight import estimate
from oelm.train.step import train_step

# Where arithmetic expects less of a difference than this, nobody wants to see one.
_ALIKE = 0.005


@dataclass(frozen=True)
class Side:
    """One contender: its median step, parameters, peak memory, and the bytes that follow from what it trains."""

    letter: str
    name: str
    median_s: float
    stored: int
    trainable: int
    # None where it was not measured.
    peak_bytes: int | None
    optimizer_bytes: int
    checkpoint_bytes: int
    all_reduced_bytes: int

    @property
    def title(self) -> str:
        """The letter tells two runs of one name apart."""
        return f"{self.letter} {self.name}"


@dataclass(frozen=True)
class Comparison:
    """Two contenders; `ratio` says how many times as fast the second is, `bound` what arithmetic allows at most."""

    first: Side
    second: Side
    ratio: Ratio
    bound: float


def compare(
    arms: Sequence[tuple[str, RunConfig]], *, rounds: int, progress: Callable[[str], None], has_memory: bool = True
) -> list[Comparison]:
    """Measure every config against the first: steps in turn in one process, memory each in a process of its own."""
    configs = {letter: config for letter, (_, config) in zip(ascii_uppercase, arms, strict=False)}
    if len(configs) < len(arms):
        raise ConfigError(f"{len(arms)} arms are too many to take turns; give {len(ascii_uppercase)} at most")
    progress(f"timing {rounds} rounds of {', '.join(configs)} in turn, after 2 to warm up")
    seconds = interleave({letter: training_step(config) for letter, config in configs.items()}, rounds=rounds, warmup=2)
    timed = against("A", seconds)
    sides = []
    for (name, config), letter in zip(arms, configs, strict=True):
        peak = None
        if has_memory:
            progress(f"measuring the memory of {letter} {name}")
            peak = peak_memory(config)
        sides.append(_side(letter, name, config, timed[letter].median_s, peak))
    return [
        Comparison(sides[0], side, timed[side.letter].ratio, bound(configs["A"], configs[side.letter])) for side in sides[1:]
    ]


def _side(letter: str, name: str, config: RunConfig, median_s: float, peak_bytes: int | None) -> Side:
    stored, trainable, state = model_size(config)
    return Side(
        letter=letter,
        name=name,
        median_s=median_s,
        stored=stored,
        trainable=trainable,
        peak_bytes=peak_bytes,
        optimizer_bytes=state,
        checkpoint_bytes=estimate(config, device="cpu").checkpoint,
        # DDP sums every gradient once a step, in float32; what is frozen has none.
        all_reduced_bytes=4 * trainable,
    )


class ModelSize(NamedTuple):
    """What a config's model keeps in its first step: parameters, those that learn, and bytes of the optimizer's state."""

    stored: int
    trainable: int
    state_bytes: int


def model_size(config: RunConfig) -> ModelSize:
    """Count what a config's model keeps. AdamW has two numbers for each that learns, Muon one."""
    with torch.device("meta"):
        model = GPT(config.model)
    freeze(model, config.method)
    matrices = muon_parameters(model, config.optim)
    learning = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = sum(4 * size if name in matrices else 8 * size for name, size in learning.items())
    return ModelSize(sum(parameter.numel() for parameter in model.parameters()), sum(learning.values()), state)


def bound(first: RunConfig, second: RunConfig) -> float:
    """Return how many times as fast the second's step is at most, if every operation costs the same."""
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
    ratio, most = comparison.ratio, comparison.bound
    allowed = f"arithmetic allows at most {most:.3f}x" if most >= 1 else f"arithmetic expects {most:.3f}x"
    a, b = comparison.first.title, comparison.second.title
    if abs(most - 1) > _ALIKE and ratio.low <= min(1.0, most) and ratio.high >= max(1.0, most):
        return (
            f"This machine is too noisy to tell {b} from {a}: the interval holds both no difference and the bound; {allowed}. "
            "Give more --rounds or a quieter machine."
        )
    if ratio.low > 1:
        beyond = ", so what lies beyond is noise" if ratio.high > most >= 1 else ""
        gain = f"{100 * (ratio.low - 1):.1f}% to {100 * (ratio.high - 1):.1f}%"
        return f"{b} is faster than {a}, by {gain}; {allowed}{beyond}."
    if ratio.high < 1:
        return f"{b} is slower than {a}, by {100 * (1 - ratio.high):.1f}% to {100 * (1 - ratio.low):.1f}%; {allowed}."
    return f"No difference between {b} and {a} shows: between {ratio.low:.3f}x and {ratio.high:.3f}x as fast; {allowed}."
