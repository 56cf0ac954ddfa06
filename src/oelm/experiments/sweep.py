"""A sweep: every arm of a comparison at every point of the same grid, the best point of each told by validation."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oelm.errors import ConfigError
from oelm.experiments.plan import PlannedRun, plan_runs, variant_name
from oelm.experiments.registry import Experiment, Plain
from oelm.files import dump_json, read_json, write_json
from oelm.train.config import parse_override
from oelm.train.status import now_text, read_status

# Not among the seeds of any comparison: what was chosen by the luck of a seed must not be judged on that seed.
FIRST_SEED = 100
SWEEP = "sweep.json"
Grid = dict[str, list[Any]]


class SweepPoint(Plain):
    """One point of the grid: the mean over seeds of the best validation loss, or of 1 - accuracy; None while unfinished."""

    values: dict[str, Any]
    variant: str
    seeds: tuple[int, ...]
    score: float | None


class SweepRecord(Plain):
    """`sweep.json` of an experiment at a budget: the grid, every point's score, and which is best."""

    experiment: str
    budget: str
    grid: dict[str, list[Any]]
    changes: dict[str, Any]
    points: tuple[SweepPoint, ...]
    best: int | None
    at_edge: tuple[str, ...]
    written: str


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep, and which of them belong to which point of which arm."""

    grid: Grid
    changes: Mapping[str, Any]
    budget: str
    root: Path
    runs: list[PlannedRun]
    points: dict[str, list[tuple[dict[str, Any], list[PlannedRun]]]]

    def placed(self, place: Callable[[PlannedRun], PlannedRun]) -> SweepPlan:
        """Return the same sweep with every run's config changed by `place`."""
        return replace(self, runs=[place(run) for run in self.runs])


def parse_grid(texts: Sequence[str]) -> Grid:
    """Read 'optim.lr=3e-4,1e-3', once for each setting."""
    grid: Grid = {}
    for text in texts:
        key, _, listed = text.partition("=")
        values = [parse_override(f"{key}={value.strip()}")[1] for value in listed.split(",") if value.strip()]
        if not key or len(values) < 2:
            raise ConfigError(f"--grid {text!r}: write it as key=value,value, for example --grid optim.lr=3e-4,1e-3")
        if key in grid or len({dump_json(value) for value in values}) != len(values):
            raise ConfigError(f"--grid {text!r}: the same setting or value stands there twice")
        if key in ("seed", "method"):
            raise ConfigError(f"--grid {text!r}: {key} is not tuned; give seeds with --seeds, methods as experiments")
        grid[key] = sorted(values) if all(isinstance(value, int | float) for value in values) else values
    if not grid:
        raise ConfigError("say what to try: --grid optim.lr=3e-4,1e-3")
    return grid


def plan_sweep(
    experiments: Sequence[Experiment], grid: Grid, *, budget: str, num_seeds: int, root: Path, changes: Mapping[str, Any]
) -> SweepPlan:
    """Return the runs of a sweep: the same points and seeds for every arm."""
    seeds = list(range(FIRST_SEED, FIRST_SEED + num_seeds))
    points: dict[str, list[tuple[dict[str, Any], list[PlannedRun]]]] = {experiment.id: [] for experiment in experiments}
    runs: list[PlannedRun] = []
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        both = {**changes, **point}
        planned = plan_runs(
            experiments,
            budget=budget,
            seeds=seeds,
            root=root,
            changes={experiment.id: both for experiment in experiments},
            variant=variant_name(both),
        )
        runs += planned
        for experiment in experiments:
            points[experiment.id].append((point, [run for run in planned if run.experiment.id == experiment.id]))
    return SweepPlan(grid, changes, budget, root, sorted(runs, key=lambda run: run.seed), points)


def conclude_sweep(plan: SweepPlan) -> list[SweepRecord]:
    """Score every point from what its runs left, choose the best of each arm, and write each arm's sweep.json."""
    records = []
    for experiment, points in plan.points.items():
        scored = tuple(
            SweepPoint(
                values=values,
                variant=runs[0].variant,
                seeds=tuple(run.seed for run in runs),
                score=_score(runs),
            )
            for values, runs in points
        )
        finished = [number for number, point in enumerate(scored) if point.score is not None]
        # The same budget for every arm, or no choice: a best of fewer tries is a worse best.
        is_whole = len(finished) == len(scored)
        best = min(finished, key=lambda number: scored[number].score or 0.0) if is_whole else None
        record = SweepRecord(
            experiment=experiment,
            budget=plan.budget,
            grid=plan.grid,
            changes=dict(plan.changes),
            points=scored,
            best=best,
            at_edge=() if best is None else edges(plan.grid, scored[best].values),
            written=now_text(),
        )
        write_json(plan.root / experiment / plan.budget / SWEEP, record.model_dump(mode="json"))
        records.append(record)
    return records


def _score(runs: Sequence[PlannedRun]) -> float | None:
    """Return the mean of what is least at the best: log PPL, or the share of errors."""
    scores = []
    for run in runs:
        status = read_status(run.path)
        if status is None or status.status != "done":
            return None
        figures = read_json(run.path / "timing_stats.json")
        scores.append(figures["best_val_loss"] if status.metric == "ppl" else 1.0 - figures["best_accuracy"])
    return statistics.fmean(scores)


def edges(grid: Grid, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings whose best value is the first or last of several numbers: the true best may lie outside."""
    numeric = {key: tried for key, tried in grid.items() if all(isinstance(value, int | float) for value in tried)}
    return tuple(key for key, tried in numeric.items() if values[key] in (tried[0], tried[-1]))


def read_sweep(experiment: str, budget: str, root: Path) -> SweepRecord:
    """Return an arm's sweep; ConfigError says how to make one."""
    path = root / experiment / budget / SWEEP
    if not path.is_file():
        raise ConfigError(
            f"--tuned: {experiment} was not swept at {budget} (no {path}); "
            f"do it first: oelm sweep {experiment} --budget {budget} --grid optim.lr=..."
        )
    try:
        return SweepRecord.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        raise ConfigError(f"{path}: damaged ({problem.errors()[0]['msg']}); repeat the sweep") from None


def tuned_changes(
    experiments: Sequence[Experiment], budget: str, root: Path, *, changes: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], str]:
    """Return each arm's changes with the best of its sweep, and the variant they share; all must be of one sweep."""
    records = [read_sweep(experiment.id, budget, root) for experiment in experiments]
    for record in records:
        if record.best is None:
            raise ConfigError(f"--tuned: the sweep of {record.experiment} is not finished; repeat its command")
        if record.grid != records[0].grid or [p.seeds for p in record.points] != [p.seeds for p in records[0].points]:
            raise ConfigError(
                f"--tuned: {record.experiment} and {records[0].experiment} were swept over different grids or seeds, so "
                "their best are not comparable; sweep them together"
            )
    chosen = {record.experiment: {**changes, **record.points[record.best or 0].values} for record in records}
    digest = variant_name({"grid": records[0].grid, **changes}).rsplit("-", 1)[-1]
    return chosen, f"tuned-{digest}"
