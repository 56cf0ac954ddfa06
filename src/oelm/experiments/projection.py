"""What runs would take on GPUs that nobody here has: arithmetic on paper, from operations and data sheets, never measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from oelm.config import FinetuneConfig, RunConfig
from oelm.errors import ConfigError
from oelm.experiments.forecast import count_parameters, run_steps, step_operations
from oelm.experiments.plan import PlannedRun, known_vocabulary
from oelm.experiments.slots import queue_seconds
from oelm.train.dist import World
from oelm.train.preflight import estimate

# Evaluations, checkpoints and starting up, as a share of the steps' time.
_OVERHEAD = 1.15
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
# The earlier study's GPT-01 on its RTX A5000, as reported: the one real figure there is for this recipe on a GPU.
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
    """One run on paper: seconds alone on a GPU and spread over all of them, memory of each, gradients summed a step."""

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


def parse_gpus(text: str) -> tuple[Gpu, int]:
    """Return a GPU by name, whatever its case, and how many: `A100`, or `8xA100`."""
    found = re.fullmatch(r"(?:([1-9][0-9]{0,5})x)?(.+)", text.upper(), re.IGNORECASE)
    if found is None or found[2] not in GPUS:
        raise ConfigError(f"--on {text!r}: give one of {', '.join(GPUS)}, or several of it, such as 8xA100")
    return GPUS[found[2]], int(found[1] or 1)


def project(run: PlannedRun, on: Assumptions) -> Projection | None:
    """Return what a run takes on paper; None where its model is not known here."""
    counted = count_parameters(run.config)
    operations = step_operations(run.config, counted)
    if counted is None or operations is None:
        return None
    steps = run_steps(run.config)
    step_s = operations / (on.gpu.operations_per_s * on.efficiency)
    # A ring sends and receives each gradient nearly twice; as if nothing of it overlapped the backward pass.
    summed = _FLOAT * counted.trainable
    ranks = _ranks(run.config, on.count)
    exchange_s = 2 * (ranks - 1) / ranks * summed / on.gpu.link_bytes_per_s
    return Projection(
        run=run,
        alone_s=_OVERHEAD * steps * step_s,
        spread_s=_OVERHEAD * steps * (step_s / ranks + exchange_s),
        memory_bytes=_memory(run.config, counted.total, counted.trainable),
        summed_bytes=summed,
    )


def _ranks(config: RunConfig | FinetuneConfig, count: int) -> int:
    """Return how many of the GPUs a batch divides among."""
    return max(number for number in range(1, count + 1) if config.batch_size % number == 0)


def _memory(config: RunConfig | FinetuneConfig, total: int, trainable: int) -> int:
    if isinstance(config, RunConfig):
        shape = known_vocabulary(config).model
        size = World(size=1).micro_batch_size(config.batch_size, config.micro_batch_size)
        config = config.model_copy(update={"model": shape, "micro_batch_size": size})
        return estimate(config, device="cuda").memory
    # Weights, gradients and two moments, and about as much again for what the backward pass keeps.
    return _FLOAT * (total + 3 * trainable) * 2


def interval_s(run: PlannedRun, *, efficiency: float) -> float | None:
    """Return the seconds between two checkpoints of a run on the fastest GPU that is known here."""
    projected = project(run, Assumptions(FASTEST, 1, efficiency, 0.0))
    if projected is None:
        return None
    steps = run_steps(run.config)
    return projected.alone_s * (run.config.save_every or steps) / steps


def queue_s(projections: Sequence[Projection], count: int) -> float:
    """Return how long runs take when each has a GPU of its own and as many as there are go on at once."""
    return queue_seconds(sorted((projection.alone_s for projection in projections), reverse=True), count)
