"""Interleaved comparison: contenders take turns in one process; `oelm bench` times training steps this way."""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.config import FinetuneConfig, RunConfig, parse_as, parse_config
from oelm.errors import ConfigError, OelmError, suggest
from oelm.files import dump_json
from oelm.method.apply import freeze
from oelm.method.method import PRESETS
from oelm.models.gpt import GPT, build_gpt, skeleton
from oelm.models.hub import ClassifierShape, fresh_classifier
from oelm.models.shape import GPTConfig, StepWork, method_work
from oelm.stats import Ratio, mean_ratio
from oelm.text import duration
from oelm.train.device import Compute, choose_compute, synchronize
from oelm.train.dist import ALONE, World
from oelm.train.loss import mean_cross_entropy
from oelm.train.optim import build_optimizer, muon_parameters
from oelm.train.step import train_step

OnRound = Callable[[str], None]
_LINE_EVERY_S = 1.0


def silent(text: str) -> None:
    """Print nothing."""


def interleave(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1, progress: OnRound = silent
) -> dict[str, list[float]]:
    """Run every contender once per round, in an order that reverses each round; return seconds, warm-up left out."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    on_round = round_lines(progress, warmup + rounds)
    for number in range(-warmup, rounds):
        # A-B-B-A: a machine that slows down steadily favours nobody.
        for name in list(contenders) if number % 2 else reversed(list(contenders)):
            started = time.perf_counter()
            contenders[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
        # Between rounds, where nothing is timed.
        on_round(warmup + number + 1)
    return seconds


def round_lines(progress: OnRound, total: int, *, clock: Callable[[], float] = time.monotonic) -> Callable[[int], None]:
    """Return what to call after each of the rounds: it prints how many are done and the time left, at most once a second."""
    began = last = clock()

    def on_round(done: int) -> None:
        nonlocal last
        now = clock()
        if done < total and now - last >= _LINE_EVERY_S:
            last = now
            progress(f"round {done} of {total}, ETA {duration((now - began) * (total - done) / done)}")

    return on_round


@dataclass(frozen=True)
class Timed:
    """A contender's median, and how many times as fast it is as the reference."""

    median_s: float
    ratio: Ratio


def against(reference: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, Timed]:
    """Return every contender of an interleaved timing against one of them."""
    return {name: Timed(statistics.median(values), mean_ratio(seconds[reference], values)) for name, values in seconds.items()}


BenchConfig = RunConfig | FinetuneConfig
# A smaller expected difference is not worth measuring.
_ALIKE = 0.005


@dataclass(frozen=True)
class Side:
    """One contender: its median step, parameters, optimizer state, and peak memory (None: not measured)."""

    letter: str
    name: str
    median_s: float
    stored: int
    trainable: int
    optimizer_bytes: int
    peak_bytes: int | None

    @property
    def title(self) -> str:
        """Name with its letter, because two sides may have the same name."""
        return f"{self.letter} {self.name}"

    @property
    def checkpoint_bytes(self) -> int:
        return 4 * self.stored + self.optimizer_bytes

    @property
    def all_reduced_bytes(self) -> int:
        """DDP sums every gradient once a step, in float32."""
        return 4 * self.trainable


@dataclass(frozen=True)
class Comparison:
    """Two contenders; `ratio` is the second's relative speed, `bound` the most that arithmetic allows."""

    first: Side
    second: Side
    ratio: Ratio
    bound: float


def compare_arms(
    arms: Sequence[tuple[str, BenchConfig]], *, rounds: int, progress: OnRound, has_memory: bool = True
) -> list[Comparison]:
    """Measure every config against the first: steps in turn in one process, memory in a separate process each."""
    configs = {letter: config for letter, (_, config) in zip(ascii_uppercase, arms, strict=False)}
    if len(configs) < len(arms):
        raise ConfigError(f"{len(arms)} arms are too many to take turns; give {len(ascii_uppercase)} at most")
    titles = ", ".join(f"{letter} {name}" for letter, (name, _) in zip(configs, arms, strict=True))
    progress(f"timing training steps of {titles} in turn: {rounds} rounds after 2 to warm up")
    steps = {letter: training_step(config) for letter, config in configs.items()}
    seconds = interleave(steps, rounds=rounds, warmup=2, progress=progress)
    timed = against("A", seconds)
    sides = []
    for (name, config), letter in zip(arms, configs, strict=True):
        peak = None
        if has_memory:
            progress(f"measuring the memory of {letter} {name}")
            peak = peak_memory(config)
        sides.append(Side(letter, name, timed[letter].median_s, *model_size(config), peak))
    return [
        Comparison(sides[0], side, timed[side.letter].ratio, bound(configs["A"], configs[side.letter])) for side in sides[1:]
    ]


class ModelSize(NamedTuple):
    """A config's model in its first step: parameters, trainable ones, and bytes of the optimizer's state."""

    stored: int
    trainable: int
    state_bytes: int


def model_size(config: BenchConfig) -> ModelSize:
    """Count a config's model. AdamW keeps two numbers per trainable parameter, Muon one."""
    with torch.device("meta"):
        model = skeleton(config.model) if isinstance(config, RunConfig) else _classifier(config)
    freeze(model, config.method)
    matrices = muon_parameters(model, config.optim)
    learning = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = sum(4 * size if name in matrices else 8 * size for name, size in learning.items())
    return ModelSize(sum(parameter.numel() for parameter in model.parameters()), sum(learning.values()), state)


def timed_shape(config: BenchConfig) -> GPTConfig:
    """Return the sizes of a config's model and inputs; a fresh classifier is described as a GPT of that size."""
    if isinstance(config, RunConfig):
        return config.model
    sizes = {name: getattr(config.model, name) for name in ("vocab_size", "model_dim", "num_layers", "num_heads", "ff_dim")}
    return GPTConfig(**sizes, seq_len=config.examples.max_length, dropout=config.model.dropout or 0.0)


def _classifier(config: FinetuneConfig) -> nn.Module:
    """Return a fresh classifier, without the padding and labels that data would give."""
    size = config.model
    if size.source is not None:
        raise ConfigError(f"model.source = {size.source}: fresh weights are timed; remove it, and give the sizes with --set")
    built = ClassifierShape.of(size, seq_len=config.examples.max_length, num_labels=size.num_labels or 2, pad=0, end=None)
    return fresh_classifier(size.architecture, built, dropout=size.dropout, seed=config.seed)


def bound(first: BenchConfig, second: BenchConfig) -> float:
    """Return the second's highest possible relative speed, if every operation costs the same."""
    return _work(first).total / _work(second).total


def _work(config: BenchConfig) -> StepWork:
    """Return the operations of a config's first step, without those that its method avoids."""
    method, depth = config.method, config.model.num_layers
    rows = ALONE.micro_batch_size(config.batch_size, config.micro_batch_size)
    return method_work(
        timed_shape(config),
        method,
        batch_size=config.batch_size,
        micro_batches=config.batch_size // rows,
        layers=[layer for layer in range(depth) if method.selects(layer, depth)],
        learn_layers=[layer for layer in range(depth) if method.learns_in(layer, depth)],
        is_classifier=isinstance(config, FinetuneConfig),
    )


def training_step(
    config: BenchConfig, *, world: World = ALONE, lengths: Sequence[Sequence[int]] | None = None
) -> Callable[[], None]:
    """Return a function that takes one complete training step of a config on random tokens.

    In a world of several processes it computes this one's share of the batch, and the sum of gradients. A classifier's
    examples have the config's length; with `lengths`, each step has the next batch of these, padded to its longest.
    """
    compute = choose_compute(config.device, config.precision)
    model = build_gpt(config.model, seed=config.seed) if isinstance(config, RunConfig) else _classifier(config)
    freeze(model, config.method, seed=config.seed)
    model.to(compute.device)
    optimizer = build_optimizer(model, config.optim, device=compute.device)
    scaler = torch.amp.GradScaler(compute.device, enabled=compute.precision == "fp16")
    forward = world.wrap(torch.compile(model) if config.compile else model)  # type: ignore[arg-type]
    size = world.micro_batch_size(config.batch_size, config.micro_batch_size)
    shape = timed_shape(config)
    windows = torch.randint(shape.vocab_size, (size, shape.seq_len + 1), generator=torch.Generator().manual_seed(0))
    if isinstance(model, GPT):
        loss = _text_loss(forward, model, windows.to(compute.device), compute)
    else:
        batches = itertools.cycle(lengths or [[shape.seq_len] * size])
        loss = _label_loss(forward, windows.to(compute.device), batches, compute)

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


Loss = Callable[[int], Tensor]


def _text_loss(forward: nn.Module, model: GPT, windows: Tensor, compute: Compute) -> Loss:
    def loss(micro_batch: int) -> Tensor:
        with compute.autocast():
            hidden = forward(windows[:, :-1]).flatten(0, 1)
            return mean_cross_entropy(hidden, model.head_VD, windows[:, 1:].flatten())

    return loss


def _label_loss(forward: nn.Module, tokens: Tensor, batches: Iterator[Sequence[int]], compute: Compute) -> Loss:
    """Return the loss of a classifier on random tokens, padded to the longest example of each batch."""
    labels = torch.arange(len(tokens), device=tokens.device) % 2

    def loss(micro_batch: int) -> Tensor:
        lengths = torch.tensor(next(batches), device=tokens.device)
        longest = int(lengths.max())
        mask = torch.arange(longest, device=tokens.device) < lengths.unsqueeze(-1)
        with compute.autocast():
            logits: Tensor = forward(input_ids=tokens[:, :longest], attention_mask=mask.long()).logits
        return F.cross_entropy(logits.float(), labels)

    return loss


def peak_memory(config: BenchConfig) -> int:
    """Return by how many bytes two steps in a separate process grow it beyond its imports."""
    command = [sys.executable, "-m", "oelm.bench.machine"]
    child = subprocess.run(command, input=dump_json(config.as_dict()), capture_output=True, text=True)
    if child.returncode:
        raise OelmError(f"measuring memory failed: {child.stderr.strip().splitlines()[-1:]}")
    return int(json.loads(child.stdout)["bytes"])


def conclusion(comparison: Comparison) -> str:
    """Return a sentence about what the interval shows."""
    ratio, most = comparison.ratio, comparison.bound
    allowed = f"arithmetic allows at most {most:.3f}x" if most >= 1 else f"arithmetic expects {most:.3f}x"
    a, b = comparison.first.title, comparison.second.title
    if abs(most - 1) > _ALIKE and ratio.low <= min(1.0, most) and ratio.high >= max(1.0, most):
        return (
            f"This machine is too noisy to compare {b} with {a}: the interval holds both no difference and the bound; "
            f"{allowed}. Use more --rounds or a quieter machine."
        )
    if ratio.low > 1:
        beyond = ", so anything beyond is noise" if ratio.high > most >= 1 else ""
        gain = f"{100 * (ratio.low - 1):.1f}% to {100 * (ratio.high - 1):.1f}%"
        return f"{b} is faster than {a}, by {gain}; {allowed}{beyond}."
    if ratio.high < 1:
        return f"{b} is slower than {a}, by {100 * (1 - ratio.high):.1f}% to {100 * (1 - ratio.low):.1f}%; {allowed}."
    return f"No measurable difference between {b} and {a}: between {ratio.low:.3f}x and {ratio.high:.3f}x as fast; {allowed}."


_COLUMNS = ("vocab_size", "seq_len", "model_dim", "num_layers", "num_heads", "ff_dim", "batch_size")
# Independent of the budgets, which may change: a published ratio must keep its meaning.
_SHAPES = {
    "laptop": (512, 64, 128, 4, 4, 512, 32),
    "512": (2048, 256, 512, 6, 8, 2048, 8),
    "medium": (50257, 512, 512, 6, 8, 2048, 8),
    # A smoke test of the benchmarks; never a result.
    "tiny": (300, 16, 32, 2, 2, 64, 4),
}
# The shape of bert-base with fresh weights: the earlier study's classifier, at its batch and length.
CLASSIFIER = "bert"
_BERT = {"vocab_size": 30522, "model_dim": 768, "num_layers": 12, "num_heads": 12, "ff_dim": 3072, "num_labels": 3}
# Arms in which Q and K learn with one row in eight, or one in two: the rivals of freezing them, in speed too.
THIN = "thin"
RIVALS = {THIN: 8, "half": 2}


def shape_settings(name: str) -> dict[str, Any]:
    """Return the settings of a step of this shape, without dropout; raise ConfigError for an unknown name."""
    if name not in (*_SHAPES, CLASSIFIER):
        known = (*_SHAPES, CLASSIFIER)
        raise ConfigError(f"unknown shape {name!r}{suggest(name, known)}; shapes: {', '.join(known)}")
    # Random tokens are timed; no data is read.
    common: dict[str, Any] = {"schedule": {"warmup_steps": 0}, "steps": 1000}
    if name == CLASSIFIER:
        examples = {"task": "stdlib", "max_length": 128}
        sizes = {"batch_size": 16, "micro_batch_size": 16}
        return common | sizes | {"model": _BERT | {"dropout": 0.0}, "examples": examples, "optim": {"lr": 2e-5}}
    model: dict[str, Any] = dict(zip(_COLUMNS, _SHAPES[name], strict=True))
    batch_size = model.pop("batch_size")
    return common | {
        "model": model | {"dropout": 0.0},
        "data": {"source": "stdlib", "tokenizer": "bpe:512"},
        "optim": {"lr": 3e-4},
        "batch_size": batch_size,
        "micro_batch_size": batch_size,
        "eval_every": 1000,
        "save_every": 1000,
    }


def with_arm(settings: dict[str, Any], arm: str) -> dict[str, Any]:
    """Return the settings with a method, or those of the baseline with fewer rows in Q and K."""
    changed = copy.deepcopy(settings)
    if arm in PRESETS:
        return changed | {"method": arm}
    if arm not in RIVALS:
        known = (*PRESETS, *RIVALS)
        raise ConfigError(f"unknown arm {arm!r}{suggest(arm, known)}; give a run's config.json or one of {', '.join(known)}")
    if "examples" in changed:
        raise ConfigError(f"{arm!r} needs our GPT, and shape '{CLASSIFIER}' is a BERT; give a method, e.g. oelm_freeze")
    head_dim = changed["model"]["model_dim"] // changed["model"]["num_heads"]
    changed["model"]["qk_dim"] = max(1, head_dim // RIVALS[arm])
    return changed | {"method": "baseline"}


def shape_config(shape: str, arm: str, *, dropout: float = 0.0) -> RunConfig:
    """Return the config of one arm at a named shape."""
    settings = with_arm(shape_settings(shape), arm)
    settings["model"]["dropout"] = dropout
    return parse_config(settings, where=f"{arm} at {shape}")


def classifier_config(arm: str, *, max_length: int = 128) -> FinetuneConfig:
    """Return the config of one arm at the classifier's shape, with examples of this length."""
    settings = with_arm(shape_settings(CLASSIFIER), arm)
    settings["examples"]["max_length"] = max_length
    return parse_as(FinetuneConfig, settings, where=f"{arm} at {CLASSIFIER}")
