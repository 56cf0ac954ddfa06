"""A sweep: every arm of a comparison at every point of one grid; validation chooses the best point of each arm."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import ValidationError, model_validator

from oelm.config import RunConfig, parse_override
from oelm.errors import ConfigError, DataError, NonFiniteError
from oelm.experiments.catalog import Experiment
from oelm.experiments.plan import CLOSE, PACE, TUNED, PlannedRun, check_method_key, plan_runs, variant_name
from oelm.files import Strict, read_json, write_json
from oelm.runs.layout import METRICS, SWEEP, TIMING
from oelm.runs.metrics import read_metrics
from oelm.runs.status import now_text, read_status

# Seeds of no comparison: settings chosen on a seed must not be judged on it.
FIRST_SEED = 100
Grid = dict[str, list[Any]]


def value_text(value: Any) -> str:
    """Return a value as --set and --grid take it: null, and text without quotes."""
    return value if isinstance(value, str) else json.dumps(value)


class SweepPoint(Strict):
    """One point of the grid. `score` is the mean over seeds of the best validation loss, or of 1 - accuracy.

    It is None while unfinished, and for good if the loss was not finite (`has_failed`). `problem` is why a run failed that
    can be repeated: out of memory, a full disk, missing data.
    """

    values: dict[str, Any]
    variant: str
    seeds: tuple[int, ...]
    score: float | None
    has_failed: bool = False
    problem: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{key} {value_text(value)}" for key, value in self.values.items())


class SweepRecord(Strict):
    """`sweep.json` of an experiment at a budget: the grid, the score of every point, and the best.

    `like` is the experiment that was swept, if the sweep was taken over from another one.
    """

    experiment: str
    budget: str
    grid: dict[str, list[Any]]
    changes: dict[str, Any]
    points: tuple[SweepPoint, ...]
    best: int | None
    at_edge: tuple[str, ...]
    written: str
    like: str | None = None

    @model_validator(mode="after")
    def _best_is_there(self) -> Self:
        if self.best is not None and not 0 <= self.best < len(self.points):
            raise ValueError(f"best is {self.best}, of {len(self.points)} points")
        scores = [point.score for point in self.points if point.score is not None]
        chosen = None if self.best is None else self.points[self.best].score
        if self.best is not None and (chosen is None or chosen != min(scores)):
            raise ValueError(f"best is point {self.best} with the score {chosen}, the least is {min(scores, default=None)}")
        return self

    @property
    def terms(self) -> tuple[object, ...]:
        """What the sweeps of two arms must share for their best to be comparable."""
        return self.grid, self.changes, [(point.values, point.seeds) for point in self.points]

    @property
    def margin(self) -> float:
        """How close to the best a point must be to be chosen easily with other seeds; more seeds make it smaller."""
        return CLOSE / math.sqrt(len(self.points[0].seeds))

    @property
    def close(self) -> tuple[SweepPoint, ...]:
        """The points within `margin` of the best."""
        least = None if self.best is None else self.points[self.best].score
        others = [point for number, point in enumerate(self.points) if number != self.best]
        return tuple(
            point for point in others if least is not None and point.score is not None and point.score - least < self.margin
        )

    @property
    def why_no_best(self) -> str:
        """Why no point is the best, and what to do; '' if one is."""
        if self.best is not None:
            return ""
        if all(point.has_failed for point in self.points):
            return "has no best: the loss was not finite at any point; sweep other values"
        if (failed := next((point for point in self.points if point.problem), None)) is None:
            return "is not finished; repeat its command"
        return f"is not finished: {failed} failed ({failed.problem}); fix that, and repeat its command with --retry"


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep, and the runs of each point by arm."""

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
    """Parse 'optim.lr=3e-4,1e-3', one text for each setting."""

    grid: Grid = {}
    for text in texts:
        key, _, listed = text.partition("=")
        parts = [part.strip() for part in listed.split(",") if part.strip()]
        if len(parts) == 1 and all(key.split(".")):
            raise ConfigError(f"--grid {text!r}: a sweep needs two values at least; or use `oelm run --set {key}={parts[0]}`")
        if not all(key.split(".")) or not parts:
            raise ConfigError(f"--grid {text!r}: write it as key=value,value, for example --grid optim.lr=3e-4,1e-3")
        check_method_key(key, option="--grid")
        if key.split(".")[0] in ("seed", "method") and key not in PACE:
            raise ConfigError(f"--grid {text!r}: {key} cannot be tuned; give seeds with --seeds and methods as experiments")
        if "[" in listed:
            raise ConfigError(f"--grid {text!r}: a list cannot be tuned; give one with --set")
        values = [parse_override(f"{key}={part}")[1] for part in parts]
        if any(isinstance(value, float) and not math.isfinite(value) for value in values):
            raise ConfigError(f"--grid {text!r}: every number must be finite")
        if key in grid or any(values.count(value) > 1 for value in values):
            raise ConfigError(f"--grid {text!r}: a setting or value is given twice")
        grid[key] = sorted(values) if _are_numbers(values) else values
    if not grid:
        raise ConfigError("name what to try: --grid optim.lr=3e-4,1e-3")
    return grid


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _check_apart(changes: Mapping[str, Any], grid: Grid) -> None:
    if both := sorted(changes.keys() & grid.keys()):
        raise ConfigError(f"--set {both[0]}: the sweep tries several values of it; remove one of the two")


def plan_sweep(
    experiments: Sequence[Experiment], grid: Grid, *, budget: str, num_seeds: int, root: Path, changes: Mapping[str, Any]
) -> SweepPlan:
    """Return the runs of a sweep: the same points and seeds for every arm."""
    _check_apart(changes, grid)
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
            grid=grid,
        )
        runs += planned
        for experiment in experiments:
            points[experiment.id].append((point, [run for run in planned if run.experiment.id == experiment.id]))
    return SweepPlan(grid, changes, budget, root, sorted(runs, key=lambda run: run.seed), points)


def conclude_sweep(plan: SweepPlan) -> list[SweepRecord]:
    """Score every point, choose the best of each arm, and write its sweep.json unless `standing` keeps the old one."""
    records = []
    for experiment, points in plan.points.items():
        scored = tuple(_scored(values, runs) for values, runs in points)
        finished = [number for number, point in enumerate(scored) if point.score is not None]
        # No choice before all points are finished: an arm with fewer tries would have a worse best.
        is_whole = all(point.score is not None or point.has_failed for point in scored)
        best = min(finished, key=lambda number: scored[number].score or 0.0) if is_whole and finished else None
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
        records.append(record)
    kept = standing(records, plan.root)
    for record in records:
        if record.experiment not in kept:
            write_json(plan.root / record.experiment / plan.budget / SWEEP, record.model_dump(mode="json"))
    return records


def standing(records: Sequence[SweepRecord], root: Path) -> dict[str, SweepRecord]:
    """Return the finished sweeps, by experiment, that --tuned uses until every arm of the new sweep has its best.

    All are replaced at once, because arms of two grids are not comparable. A record of the same points and seeds is of the
    same runs, and is replaced at any time.
    """
    if all(record.best is not None for record in records):
        return {}
    kept = {}
    for record in records:
        # Nothing to keep in a missing or damaged one.
        with contextlib.suppress(ConfigError):
            earlier = read_sweep(record.experiment, record.budget, root)
            if earlier.best is not None and (earlier.terms, earlier.like) != (record.terms, record.like):
                kept[record.experiment] = earlier
    return kept


def _scored(values: dict[str, Any], runs: Sequence[PlannedRun]) -> SweepPoint:
    """Return a point from its runs. A failure that can be repeated keeps the point: all arms need equal grids."""
    statuses = {run.seed: read_status(run.path) for run in runs}
    failures = {seed: status.message for seed, status in statuses.items() if status is not None and status.status == "failed"}
    has_failed = any(message.startswith(f"{NonFiniteError.__name__}: ") for message in failures.values())
    problems = [f"seed {seed}: {' '.join(message.split()) or 'no reason recorded'}" for seed, message in failures.items()]
    return SweepPoint(
        values=values,
        variant=runs[0].variant,
        seeds=tuple(statuses),
        score=_score(runs),
        has_failed=has_failed,
        problem=problems[0] if problems and not has_failed else "",
    )


def _score(runs: Sequence[PlannedRun]) -> float | None:
    """Return the mean log PPL, or share of errors, of finished runs; None if one is unfinished."""

    scores = []
    for run in runs:
        status = read_status(run.path)
        if status is None or status.status != "done":
            return None
        path = run.path / TIMING
        figures = read_json(path)
        try:
            is_ppl = isinstance(run.config, RunConfig)
            score = float(figures["best_val_loss"]) if is_ppl else 1.0 - float(figures["best_accuracy"])
        except (KeyError, TypeError, ValueError) as problem:
            raise DataError(f"{path}: damaged, though the run is done ({problem!r}); `oelm clean` it and repeat") from None
        _check_score(run, score, is_ppl=is_ppl)
        scores.append(score)
    return statistics.fmean(scores)


def _check_score(run: PlannedRun, score: float, *, is_ppl: bool) -> None:
    """Raise DataError if a run's best figure is not that of its evaluations."""
    name = "val_loss" if is_ppl else "val_accuracy"
    rows = read_metrics(run.path / METRICS, only='"val_loss"')
    found = [float(row[name]) if is_ppl else 1.0 - float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
    if found and not math.isclose(min(found), score, rel_tol=1e-9, abs_tol=1e-12):
        raise DataError(
            f"{run.path / TIMING}: its best gives the score {score}, {METRICS} gives {min(found)}; restore the record from a "
            "copy, or `oelm clean` the run and repeat"
        )


def edges(grid: Grid, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings whose best value is the first or last number tried: the true best may be outside."""
    numeric = {key: tried for key, tried in grid.items() if _are_numbers(tried)}
    return tuple(key for key, tried in numeric.items() if values[key] in (tried[0], tried[-1]))


def take_over(
    experiments: Sequence[Experiment], like: Experiment, *, budget: str, root: Path, dry_run: bool = False
) -> list[SweepRecord]:
    """Write the finished sweep of another experiment as that of these; raise ConfigError for one that was swept itself."""
    source = read_sweep(like.id, budget, root, asked="--like")
    if source.best is None:
        raise ConfigError(f"--like {like.id}: its sweep {source.why_no_best}")
    origin = {"like": source.like or like.id, "written": now_text()}
    records = [source.model_copy(update={"experiment": experiment.id, **origin}) for experiment in experiments]
    for experiment, record in zip(experiments, records, strict=True):
        _check_taker(experiment, like, record, root / experiment.id / budget)
    for record in [] if dry_run else records:
        write_json(root / record.experiment / budget / SWEEP, record.model_dump(mode="json"))
    return records


def _check_taker(experiment: Experiment, like: Experiment, record: SweepRecord, folder: Path) -> None:
    """Raise ConfigError if an experiment must not take over this sweep."""
    if experiment.id == like.id:
        raise ConfigError(f"--like {like.id}: it is one of the experiments that would take over its sweep; remove it")
    if experiment.kind != like.kind:
        raise ConfigError(f"--like {like.id}: it is a {like.kind.replace('_', ' ')}, and {experiment.id} is not")
    # An arm may take over from another arm of its baseline; a baseline only from a baseline with the same method.
    is_represented = experiment.baseline is not None and experiment.baseline == like.baseline
    if not is_represented and (experiment.method, bool(experiment.baseline)) != (like.method, bool(like.baseline)):
        raise ConfigError(
            f"--like {like.id}: it has neither the method nor the baseline of {experiment.id}, so their best may differ; "
            "name an arm that has one of them"
        )
    if not (folder / SWEEP).exists():
        return
    present = read_sweep(experiment.id, record.budget, folder.parent.parent, asked="--like")
    if present.like is None:
        raise ConfigError(f"{experiment.id} was swept itself at {record.budget}; remove it")
    # Otherwise one could try the best of several sweeps until one wins.
    is_same = (present.like, present.best, present.points) == (record.like, record.best, record.points)
    if not is_same and any(folder.glob(f"{TUNED}*")):
        raise ConfigError(f"{experiment.id} has runs with the best of {present.like}; for another's give another --out")


def read_sweep(experiment: str, budget: str, root: Path, *, asked: str = "--tuned", along: Sequence[str] = ()) -> SweepRecord:
    """Return an arm's sweep; ConfigError says how to make one. `asked` is the option that needs it.

    `along` are the experiments to sweep together with this one.
    """
    path = root / experiment / budget / SWEEP
    if not path.is_file():
        raise ConfigError(
            f"{asked}: {experiment} was not swept at {budget} (no {path}); "
            f"do it first: oelm sweep {' '.join(along) or experiment} --budget {budget} --grid optim.lr=..."
        )
    try:
        return SweepRecord.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        reason = f"{where}{first['msg']}" if path.stat().st_size else "the file is empty"
        raise ConfigError(f"{path}: damaged ({reason}); restore it from a copy, or repeat the sweep") from None


class Tuned(NamedTuple):
    """Each arm's changes with the best of its sweep, the variant they share, and the arm whose sweep was taken over."""

    changes: dict[str, dict[str, Any]]
    variant: str
    like: dict[str, str | None]


def tuned_changes(experiments: Sequence[Experiment], budget: str, root: Path, *, changes: Mapping[str, Any]) -> Tuned:
    """Return the best settings of arms by their sweeps, which must share a grid; raise ConfigError otherwise."""
    from oelm.experiments.plan import variant_name

    # `oelm sweep` adds the baselines itself.
    arms = [experiment.id for experiment in experiments if experiment.baseline is not None]
    records = [read_sweep(experiment.id, budget, root, along=arms) for experiment in experiments]
    for record in records:
        if record.best is None:
            raise ConfigError(f"--tuned: the sweep of {record.experiment} {record.why_no_best}")
        if record.terms != records[0].terms:
            stale = next((each for each in (record, records[0]) if each.like), None)
            how = f"repeat oelm sweep {stale.experiment} --like {stale.like}" if stale else "sweep them together"
            raise ConfigError(
                f"--tuned: {record.experiment} and {records[0].experiment} were swept over different grids or seeds or with "
                f"different --set, so their best are not comparable; {how}"
            )
    _check_apart(changes, records[0].grid)
    chosen = {record.experiment: {**changes, **record.points[record.best or 0].values} for record in records}
    digest = variant_name({"grid": records[0].grid, **changes}).rsplit("-", 1)[-1]
    # The user's changes are in the name, as for untuned runs.
    changed = f"{variant_name(changes).rsplit('-', 1)[0]}-" if changes else ""
    return Tuned(chosen, f"{TUNED}{changed}{digest}", {record.experiment: record.like for record in records})
