"""A study: which experiments, at which budget and seeds; planned, checked, and its data prepared."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oelm.config import FinetuneConfig, RunConfig
from oelm.data.public_sets import CORPORA, TASKS
from oelm.data.request import Request
from oelm.errors import REFUSED, ConfigError, DiskFullError, OelmError
from oelm.experiments.catalog import Catalog, Experiment
from oelm.experiments.plan import (
    PlannedRun,
    check_changes,
    check_same_recipe,
    plan_runs,
    tuned_alike,
    variant_name,
    with_baselines,
)
from oelm.experiments.sweep import Grid, SweepPlan, plan_sweep, tuned_changes
from oelm.files import check_can_hold
from oelm.models.hub import model_folder
from oelm.process import StopFlag
from oelm.runs.status import read_status
from oelm.train.device import Estimate, choose_compute, gibibytes
from oelm.train.session import open_task
from oelm.train.task import seen_progress
from oelm.train.watch import Watch


@dataclass
class Readiness:
    """What each run needs, or why it cannot start."""

    needs: dict[Path, Estimate] = field(default_factory=dict)
    problems: dict[Path, OelmError] = field(default_factory=dict)


def make_ready(runs: Sequence[PlannedRun], *, folder: Path | None, stop: StopFlag, watch: Watch) -> Readiness:
    """Prepare each data set that the runs read, from local copies in `folder` if it has them.

    A set that cannot be prepared (no network, a missing file) stops only the runs that read it.
    """
    found: dict[object, Estimate | OelmError] = {}
    ready = Readiness()
    for run in runs:
        # What decides which data a run reads and how large its model is.
        data = run.config.data if isinstance(run.config, RunConfig) else run.config.examples
        key = (data, run.config.model)
        if key not in found:
            try:
                found[key] = _open(run, folder=folder, stop=stop, watch=watch)
            except OelmError as problem:
                # A mistake in the command, a stop or a full disk concerns all runs.
                if problem.exit_code != REFUSED:
                    raise
                found[key] = problem if folder is not None else _with_way_out(problem, run.config)
        outcome = found[key]
        if isinstance(outcome, OelmError):
            ready.problems[run.path] = outcome
        else:
            ready.needs[run.path] = outcome
    return ready


def _with_way_out(problem: OelmError, config: RunConfig | FinetuneConfig) -> OelmError:
    """Add to an error how to use local copies."""
    source = config.data.source if isinstance(config, RunConfig) else config.examples.task
    if source not in CORPORA and source not in TASKS:
        return problem
    return type(problem)(
        f"{problem}. With local copies: repeat this command with --from FOLDER, and --model FOLDER for a pretrained classifier"
    )


def _open(run: PlannedRun, *, folder: Path | None, stop: StopFlag, watch: Watch) -> Estimate:
    if folder is not None:
        _shelve(run.config, folder, stop=stop, watch=watch)
    compute = choose_compute(run.config.device, run.config.precision)
    _, task = open_task(run.config, compute, run=run.path, progress=seen_progress(stop, watch))
    watch.on_remark(task.data.summary)
    return task.estimate(compute.device)


def _shelve(config: RunConfig | FinetuneConfig, folder: Path, *, stop: StopFlag, watch: Watch) -> None:
    """Prepare a named set from local copies, so that runs find it by name."""
    progress = seen_progress(stop, watch)
    if isinstance(config, RunConfig):
        data = config.data
        if data.source in CORPORA:
            request = Request(name=data.source, folder=folder, tokenizer=data.tokenizer, max_tokens=data.max_tokens)
            request.prepare(progress)
        return
    examples = config.examples
    if examples.task in TASKS and examples.folder is None and config.model.source is not None:
        request = Request(
            name=examples.task,
            folder=folder,
            tokenizer=str(model_folder(config.model.source)),
            max_length=examples.max_length,
            language=examples.language,
        )
        request.prepare(progress)


@dataclass(frozen=True)
class Study:
    """What to run. `model` and `copies` are local folders of a pretrained classifier and of data sets."""

    names: tuple[str, ...]
    budget: str
    root: Path
    seeds: list[int] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None
    copies: Path | None = None
    tuned: bool = False
    baselines: bool = True

    def plan(self, catalog: Catalog) -> list[PlannedRun]:
        """Return the study's runs; raise before anything is started if one of them is impossible."""
        self._check("run")
        chosen, baselines = catalog.select(self.names), catalog.baselines()
        experiments = with_baselines(catalog, chosen) if self.baselines else chosen
        changes = {experiment.id: dict(self.changes) for experiment in experiments}
        variants, like = dict.fromkeys(changes, variant_name(self.changes)), dict[str, str | None]()
        for family in _families(experiments) if self.tuned else ():
            tuned_so = tuned_changes(family, self.budget, self.root, changes=self.changes)
            changes |= tuned_so.changes
            variants |= dict.fromkeys(tuned_so.changes, tuned_so.variant)
            like |= tuned_so.like
        runs = plan_runs(experiments, budget=self.budget, seeds=self.seeds, root=self.root, changes=changes, variants=variants)
        _check_one_model(runs, self.model)
        tuned = tuple(sorted({key for chosen in changes.values() for key in chosen} - self.changes.keys()))
        sources = {name: source or name for name, source in like.items()}
        fair = {name for name in like if tuned_alike(sources[name], sources.get(baselines.get(name, ""), ""), baselines)}
        runs = [replace(_placed(run, self.model), tuned=tuned if run.experiment.id in fair else ()) for run in runs]
        for run in runs:
            check_same_recipe(run)
        return runs

    def plan_sweep(self, catalog: Catalog, grid: Grid, *, num_seeds: int) -> SweepPlan:
        """Return a sweep of the study's experiments and their baselines over a grid."""
        self._check("sweep")
        experiments = with_baselines(catalog, catalog.select(self.names))
        plan = plan_sweep(experiments, grid, budget=self.budget, num_seeds=num_seeds, root=self.root, changes=self.changes)
        _check_one_model(plan.runs, self.model)
        plan = plan.placed(lambda run: _placed(run, self.model))
        for run in plan.runs:
            check_same_recipe(run)
        return plan

    def _check(self, command: str) -> None:
        """Raise ConfigError for names, changes or folders that cannot work, before hours of preparing data."""
        check_changes(self.changes)
        if not self.names:
            raise ConfigError(f"name what to {command}: ids or groups of `oelm list`, for example `oelm {command} GPT-02`")
        for option, folder, content in (
            ("--model", self.model, "config.json and model.safetensors"),
            ("--from", self.copies, "the data sets, each in a folder of its name"),
        ):
            if folder is not None and not folder.is_dir():
                raise ConfigError(f"{option} {folder}: no such folder; give the one with {content}")
        check_can_hold("--out", self.root)


def _families(experiments: Sequence[Experiment]) -> list[list[Experiment]]:
    """Group experiments by baseline; each group may have been swept over its own grid."""
    families: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        families.setdefault(experiment.baseline or experiment.id, []).append(experiment)
    return list(families.values())


def _placed(run: PlannedRun, model: Path | None) -> PlannedRun:
    """Return the run with its pretrained model, if it has one, read from a folder."""
    if model is None or not isinstance(run.config, FinetuneConfig) or run.config.model.source is None:
        return run
    placed = run.config.model.model_copy(update={"source": str(model.absolute())})
    return replace(run, config=run.config.model_copy(update={"model": placed}))


def _check_one_model(runs: Sequence[PlannedRun], model: Path | None) -> None:
    """Raise ConfigError if one folder would replace several pretrained models."""
    meant: dict[str, str] = {}
    for run in runs:
        if isinstance(run.config, FinetuneConfig) and run.config.model.source is not None:
            meant.setdefault(run.config.model.source, run.experiment.id)
    named = [f"{source} ({name})" for source, name in meant.items()]
    if model is not None and len(named) > 1:
        raise ConfigError(f"--model {model} would replace {' and '.join(named)}; run their experiments separately")


def unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that are not done."""
    return [run for run in runs if (status := read_status(run.path)) is None or status.status != "done"]


def prepare_study(
    runs: Sequence[PlannedRun], *, folder: Path | None, stop: StopFlag, watch: Watch, preflight: bool, retry: bool
) -> dict[Path, str]:
    """Prepare the data of the unfinished runs, each set once, and check that their checkpoints fit on the disk.

    Returns why some cannot be started; raises if none can.
    """
    left = [run for run in unfinished(runs) if retry or (status := read_status(run.path)) is None or status.status != "failed"]
    ready = make_ready(left, folder=folder, stop=stop, watch=watch)
    if left and not ready.needs:
        raise next(iter(ready.problems.values()))
    total = sum(needs.disk for needs in ready.needs.values())
    there = next(parent for parent in (runs[0].path, *runs[0].path.parents) if parent.exists()) if runs else Path(".")
    free = shutil.disk_usage(there).free
    if preflight and total > free:
        raise DiskFullError(
            f"the checkpoints of {len(left)} runs take about {gibibytes(total)} and {gibibytes(free)} are free on that disk: "
            "make room, give another --out, run fewer at a time and `oelm clean --weights` between, or --no-preflight"
        )
    return {path: str(problem) for path, problem in ready.problems.items()}
