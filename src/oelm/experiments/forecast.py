"""What an experiment will take on this machine: exact parameter counts, and about how much time, memory and disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from oelm.config import FinetuneConfig, RunConfig
from oelm.data.sets import TASKS
from oelm.data.stdlib_task import NUM_LABELS
from oelm.errors import DataError, OelmError
from oelm.experiments.plan import PlannedRun, known_vocabulary
from oelm.files import read_json
from oelm.method.apply import freeze
from oelm.method.audit import Audit, audit
from oelm.models.gpt import GPT
from oelm.models.hub import ClassifierShape, fresh_classifier
from oelm.models.shape import step_work
from oelm.models.shapes import classifier_skeleton
from oelm.runs.layout import TIMING
from oelm.train.preflight import Estimate, estimate

# Of the speed of a bare matrix product: what a whole training step reaches on a CPU, norms, copies and optimizer included.
# Measured on 2 cores: 0.3 for the small models of `laptop`, 0.6 for Medium-512.
_EFFICIENCY = 0.45
_PROBE = 384
_PROBE_S = 0.15
# Evaluations and checkpoints, as a share of the steps' time.
_OVERHEAD = 1.15
# Until a run's process has loaded torch and opened its data. Measured on 2 cores busy with other work: 7 to 9 s.
START_S = 8.0
# Of the longest example: how long examples are on the whole; and of how many there are, where nobody knows yet.
_MEAN_LENGTH, _TRAIN_EXAMPLES = 0.3, {"sst2": 67_349, "mnli": 392_702, "xnli": 392_702}


@dataclass(frozen=True)
class Forecast:
    """About what one run takes. `basis` says where the seconds come from."""

    seconds: float | None
    basis: str
    needs: Estimate


class Forecaster:
    """Foretells runs: from finished ones of the same recipe, else from arithmetic and the speed of this machine."""

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
        """Return a forecast's seconds alone, in less time: a GPT's operations follow from its shape."""
        if (measured := self.measured(run)) is not None:
            return measured
        return self._calculated(run.config, None if isinstance(run.config, RunConfig) else count_parameters(run.config))

    def _calculated(self, config: RunConfig | FinetuneConfig, counted: Audit | None) -> float | None:
        work = step_operations(config, counted)
        return None if work is None else START_S + _OVERHEAD * run_steps(config) * work / (_EFFICIENCY * self._rate())

    def measured(self, run: PlannedRun) -> float | None:
        """Return the wall time of a finished run of this recipe, whatever its seed, or else of its baseline's."""
        for experiment in (run.experiment.id, run.experiment.baseline):
            if experiment is None:
                continue
            folder = self._root / experiment / run.budget / run.variant
            for path in sorted(folder.glob(f"seed-*/{TIMING}")):
                try:
                    return float(read_json(path)["wall_s"]["total"])
                except (DataError, KeyError, TypeError, ValueError):
                    continue
        return None

    def _rate(self) -> float:
        if self._speed is None:
            self._speed = _matmul_rate(self._threads)
        return self._speed


def expected_seconds(runs: Sequence[PlannedRun], root: Path, *, threads: int | None) -> dict[str, float]:
    """Return about how long runs take, by path; without `threads`, on a GPU whose speed is not known, only as measured."""
    forecaster = Forecaster(root, threads=threads or 1)
    arms: dict[tuple[str, str], list[PlannedRun]] = {}
    for run in runs:
        arms.setdefault((run.experiment.id, run.variant), []).append(run)
    found: dict[str, float] = {}
    for planned in arms.values():
        # A time that cannot be told is no reason not to train.
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
    """Count a run's parameters exactly, without making their numbers; None where the model is not known here."""
    model = _skeleton(config)
    if model is None:
        return None
    freeze(model, config.method, seed=config.seed)
    return audit(model)


def _skeleton(config: RunConfig | FinetuneConfig) -> nn.Module | None:
    if isinstance(config, RunConfig):
        with torch.device("meta"):
            return GPT(known_vocabulary(config).model)
    model = config.model
    labels = model.num_labels or num_labels(config)
    if model.source is not None:
        return classifier_skeleton(model.source, num_labels=labels)
    with torch.device("meta"):
        return fresh_classifier(
            model.architecture,
            ClassifierShape(
                vocab_size=model.vocab_size,
                seq_len=config.examples.max_length,
                model_dim=model.model_dim,
                num_layers=model.num_layers,
                num_heads=model.num_heads,
                ff_dim=model.ff_dim,
                num_labels=labels,
                pad=0,
                end=0,
            ),
            seed=0,
        )


def num_labels(config: FinetuneConfig) -> int:
    """Return how many labels a task has; of a user's own table those that the config names, else two."""
    task, named = config.examples.task, config.examples.labels
    if task in TASKS:
        return len(TASKS[task].labels)
    if task == "stdlib":
        return NUM_LABELS
    return 2 if named is None else len(named.split(","))


def step_operations(config: RunConfig | FinetuneConfig, counted: Audit | None) -> float | None:
    """Return the operations of one training step: of a GPT counted, of others 6 a weight and token."""
    if isinstance(config, RunConfig):
        work = step_work(known_vocabulary(config).model, batch_size=config.batch_size)
        return float(work.matmuls + work.optimizer)
    if counted is None:
        return None
    embedded = sum(counted.by_role.get("embedding", {}).values())
    tokens = config.batch_size * config.examples.max_length * _MEAN_LENGTH
    return 6.0 * (counted.total - embedded) * tokens


def run_steps(config: RunConfig | FinetuneConfig) -> int:
    """Return how many steps a run has; where that follows from epochs, about so many."""
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
