"""Estimate time, memory and disk of runs: on this machine, or on GPUs by their data sheets."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from oelm.config import FinetuneConfig, RunConfig
from oelm.data.examples import NUM_LABELS
from oelm.data.public_sets import TASKS
from oelm.errors import ConfigError, OelmError
from oelm.experiments.plan import PlannedRun, known_vocabulary
from oelm.experiments.slots import queue_seconds
from oelm.method.apply import freeze
from oelm.method.audit import Audit, audit
from oelm.models.gpt import skeleton
from oelm.models.hub import ClassifierShape, classifier_skeleton, fresh_classifier
from oelm.models.shape import step_work
from oelm.runs.layout import TIMING
from oelm.runs.records import recorded_figure
from oelm.train.device import Estimate, estimate
from oelm.train.dist import World

# A training step on a CPU runs at about this share of the speed of a bare matrix product, because of norms, copies and the
# optimizer. Measured on 2 cores: 0.3 for the small models of `laptop`, 0.6 for Medium-512.
_EFFICIENCY = 0.45
_PROBE = 384
_PROBE_S = 0.15
# Evaluations and checkpoints add this to the time of the steps.
_OVERHEAD = 1.15
# Until a run's process has loaded torch and opened its data. Measured on 2 cores busy with other work: 7 to 9 s.
START_S = 8.0
# The mean length of examples as a share of the longest, and how many a task has.
_MEAN_LENGTH, _TRAIN_EXAMPLES = 0.3, {"sst2": 67_349, "mnli": 392_702, "xnli": 392_702}


@dataclass(frozen=True)
class Forecast:
    """What one run takes, roughly. `basis` is where the seconds come from."""

    seconds: float | None
    basis: str
    needs: Estimate


class Forecaster:
    """Estimates run time from finished runs of the same recipe, else from arithmetic and the speed of this machine."""

    def __init__(self, root: Path, *, threads: int) -> None:
        self._root, self._threads = root, threads
        self._speed: float | None = None

    def forecast(self, run: PlannedRun) -> Forecast:
        counted = count_parameters(run.config)
        needs = _needs(run.config, counted)
        if (measured := self.measured(run)) is not None:
            return Forecast(measured, "measured", needs)
        seconds = self._calculated(run.config, counted)
        return Forecast(seconds, "unknown here" if seconds is None else "arithmetic", needs)

    def seconds(self, run: PlannedRun) -> float | None:
        """Return only the seconds of a forecast, which is faster: a GPT's operations follow from its shape."""
        if (measured := self.measured(run)) is not None:
            return measured
        return self._calculated(run.config, None if isinstance(run.config, RunConfig) else count_parameters(run.config))

    def _calculated(self, config: RunConfig | FinetuneConfig, counted: Audit | None) -> float | None:
        if (work := step_operations(config, counted)) is None:
            return None
        if self._speed is None:
            self._speed = _matmul_rate(self._threads)
        return START_S + _OVERHEAD * run_steps(config) * work / (_EFFICIENCY * self._speed)

    def measured(self, run: PlannedRun) -> float | None:
        """Return the wall time of a finished run of this recipe with any seed, else of its baseline's."""
        for experiment in filter(None, (run.experiment.id, run.experiment.baseline)):
            folder = self._root / experiment / run.budget / run.variant
            for path in sorted(folder.glob(f"seed-*/{TIMING}")):
                if (seconds := recorded_figure(path.parent, "wall_s", "total")) is not None:
                    return seconds
        return None


def expected_seconds(runs: Sequence[PlannedRun], root: Path, *, threads: int | None) -> dict[str, float]:
    """Return about how long runs take, by path. Without `threads` (on a GPU of unknown speed), only what was measured."""
    forecaster = Forecaster(root, threads=threads or 1)
    arms: dict[tuple[str, str], list[PlannedRun]] = {}
    for run in runs:
        arms.setdefault((run.experiment.id, run.variant), []).append(run)
    found: dict[str, float] = {}
    for planned in arms.values():
        # Training does not depend on an estimate.
        with contextlib.suppress(OelmError):
            seconds = forecaster.measured(planned[0]) if threads is None else forecaster.seconds(planned[0])
            found |= {str(run.path): seconds for run in planned if seconds is not None}
    return found


def _matmul_rate(threads: int) -> float:
    """Return operations a second of a float32 matrix product with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left = torch.ones(_PROBE, _PROBE)
        _ = left @ left
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < _PROBE_S:
            _ = left @ left
            count += 1
        return 2.0 * _PROBE**3 * count / (time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)


def count_parameters(config: RunConfig | FinetuneConfig) -> Audit | None:
    """Count a run's parameters exactly, without creating weights; None if the model is not on this machine."""
    model = _skeleton(config)
    if model is None:
        return None
    freeze(model, config.method, seed=config.seed)
    return audit(model)


def _skeleton(config: RunConfig | FinetuneConfig) -> nn.Module | None:
    if isinstance(config, RunConfig):
        return skeleton(known_vocabulary(config).model)
    model = config.model
    labels = model.num_labels or num_labels(config)
    if model.source is not None:
        return classifier_skeleton(model.source, num_labels=labels)
    with torch.device("meta"):
        shape = ClassifierShape.of(model, seq_len=config.examples.max_length, num_labels=labels, pad=0, end=0)
        return fresh_classifier(model.architecture, shape, seed=0)


def num_labels(config: FinetuneConfig) -> int:
    """Return how many labels a task has; of a user's own table, those that the config names, else two."""
    task, named = config.examples.task, config.examples.labels
    if task in TASKS:
        return len(TASKS[task].labels)
    if task == "stdlib":
        return NUM_LABELS
    return 2 if named is None else len(named.split(","))


def step_operations(config: RunConfig | FinetuneConfig, counted: Audit | None) -> float | None:
    """Return the operations of one training step: counted for a GPT, else 6 per weight and token."""
    if isinstance(config, RunConfig):
        return float(step_work(known_vocabulary(config).model, batch_size=config.batch_size).total)
    if counted is None:
        return None
    embedded = sum(counted.by_role.get("embedding", {}).values())
    tokens = config.batch_size * config.examples.max_length * _MEAN_LENGTH
    return 6.0 * (counted.total - embedded) * tokens


def run_steps(config: RunConfig | FinetuneConfig) -> int:
    """Return how many steps a run has; roughly, where they follow from epochs."""
    if config.steps:
        return config.steps
    assert isinstance(config, FinetuneConfig) and config.epochs is not None
    examples = _TRAIN_EXAMPLES.get(config.examples.task, 10_000)
    if config.examples.max_train:
        examples = min(examples, config.examples.max_train)
    return round(config.epochs * examples / config.batch_size)


def _needs(config: RunConfig | FinetuneConfig, counted: Audit | None) -> Estimate:
    if isinstance(config, RunConfig):
        return estimate(known_vocabulary(config), device="cpu")
    if counted is None:
        return Estimate(0, 0, 0)
    checkpoint = 4 * (counted.total + 2 * counted.trainable)
    # Weights, gradients, two moments, and about as much again for what the backward pass keeps.
    return Estimate(memory=8 * 4 * counted.total, disk=checkpoint * (config.keep_checkpoints + 2), checkpoint=checkpoint)


# Evaluations, checkpoints and starting up, as a share of the steps' time.
_FLOAT = 4


@dataclass(frozen=True)
class Gpu:
    """A GPU by its maker's data sheet: dense half-precision tensor operations, memory, and its link, one way."""

    name: str
    operations_per_s: float
    memory_bytes: float
    link_bytes_per_s: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A5000", 111e12, 24e9, 32e9),
        Gpu("V100", 125e12, 32e9, 150e9),
        Gpu("L4", 121e12, 24e9, 32e9),
        Gpu("A100", 312e12, 80e9, 300e9),
        Gpu("H100", 989e12, 80e9, 450e9),
    )
}
FASTEST = max(GPUS.values(), key=lambda gpu: gpu.operations_per_s)
# The earlier study's GPT-01 on its RTX A5000, as reported: the only measured figure for this recipe on a GPU.
_REPORTED_STEP_S, _REPORTED_ON = 0.0837, "A5000"


@dataclass(frozen=True)
class Assumptions:
    """What a projection takes for granted: how much of its data sheet a GPU reaches, and what an hour of it costs."""

    gpu: Gpu
    count: int
    efficiency: float
    price_per_hour: float

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1 or self.count < 1 or self.price_per_hour < 0:
            raise ConfigError("the efficiency is a share from 0 to 1, GPUs are 1 at least, and --price is 0 or more")


@dataclass(frozen=True)
class Projection:
    """An estimate for one run: seconds on one GPU and on all of them, memory per GPU, gradients summed per step."""

    run: PlannedRun
    alone_s: float
    spread_s: float
    memory_bytes: int
    summed_bytes: int


def reported_efficiency(medium: RunConfig) -> float:
    """Return the share of its data sheet that the earlier study's GPU reached with its recipe."""
    operations = step_operations(medium, None)
    assert operations is not None
    return operations / _REPORTED_STEP_S / GPUS[_REPORTED_ON].operations_per_s


def named_gpus(text: str) -> tuple[Gpu, int]:
    """Return a GPU by name, whatever its case, and how many: `A100`, or `8xA100`."""
    found = re.fullmatch(r"(?:([1-9][0-9]{0,5})x)?(.+)", text.upper(), re.IGNORECASE)
    if found is None or found[2] not in GPUS:
        raise ConfigError(f"--on {text!r}: give one of {', '.join(GPUS)}, or several of it, such as 8xA100")
    return GPUS[found[2]], int(found[1] or 1)


def project(run: PlannedRun, on: Assumptions) -> Projection | None:
    """Return the estimate for a run; None if its model is not known here."""
    counted = count_parameters(run.config)
    operations = step_operations(run.config, counted)
    if counted is None or operations is None:
        return None
    steps = run_steps(run.config)
    step_s = operations / (on.gpu.operations_per_s * on.efficiency)
    # A ring sends and receives each gradient nearly twice; as if nothing of it overlapped the backward pass.
    summed = _FLOAT * counted.trainable
    # As many of the GPUs as a batch divides among.
    ranks = max(number for number in range(1, on.count + 1) if run.config.batch_size % number == 0)
    exchange_s = 2 * (ranks - 1) / ranks * summed / on.gpu.link_bytes_per_s
    return Projection(
        run=run,
        alone_s=_OVERHEAD * steps * step_s,
        spread_s=_OVERHEAD * steps * (step_s / ranks + exchange_s),
        memory_bytes=_memory(run.config, counted.total, counted.trainable),
        summed_bytes=summed,
    )


def _memory(config: RunConfig | FinetuneConfig, total: int, trainable: int) -> int:
    if isinstance(config, RunConfig):
        shape = known_vocabulary(config).model
        size = World(size=1).micro_batch_size(config.batch_size, config.micro_batch_size)
        config = config.model_copy(update={"model": shape, "micro_batch_size": size})
        return estimate(config, device="cuda").memory
    # Weights, gradients and two moments, and about as much again for what the backward pass keeps.
    return _FLOAT * (total + 3 * trainable) * 2


def interval_s(run: PlannedRun, *, efficiency: float) -> float | None:
    """Return the seconds between two checkpoints of a run on the fastest known GPU."""
    projected = project(run, Assumptions(FASTEST, 1, efficiency, 0.0))
    if projected is None:
        return None
    steps = run_steps(run.config)
    return projected.alone_s * (run.config.save_every or steps) / steps


def queue_s(projections: Sequence[Projection], count: int) -> float:
    """Return how long the runs take, one per GPU, as many at once as there are GPUs."""
    return queue_seconds(sorted((projection.alone_s for projection in projections), reverse=True), count)
