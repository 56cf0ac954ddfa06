"""Runs as a report sees them: read robustly, grouped by everything but the seed, and never mixed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection as Some
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from oelm.errors import ConfigError, DataError
from oelm.experiments.monitor import RunView, scan
from oelm.files import dump_json, read_json
from oelm.train.metrics import read_metrics
from oelm.train.records import (
    AttentionRecord,
    AuditRecord,
    EvaluationRow,
    ExampleRow,
    Figures,
    Manifest,
    read_as,
    read_rows,
)

# Where something lies, as opposed to what it is: the weights' digest and the data's fingerprint tell that.
_PLACES = (("model", "source"), ("examples", "folder"))
MixtureCode = Literal["seed_twice", "recipes_differ", "data_differ"]


@dataclass(frozen=True)
class Run:
    """One recorded run. What it has not written yet is None; `problem` says why a run that says it is done is not used."""

    experiment: str
    budget: str
    variant: str
    seed: int
    path: Path
    state: str
    message: str
    config: dict[str, Any] | None
    manifest: Manifest | None
    audit: AuditRecord | None
    figures: Figures | None
    problem: str = ""

    @property
    def is_finished(self) -> bool:
        return self.state == "done" and self.figures is not None and not self.problem

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.budget}/{self.variant}/seed-{self.seed}"

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The config without the seed, and without the places of what is known by its digest."""
        assert self.config is not None
        plain = {key: dict(value) if isinstance(value, dict) else value for key, value in self.config.items() if key != "seed"}
        for section, key in _PLACES:
            inner = plain.get(section)
            if isinstance(inner, dict) and (section != "model" or inner.get("sha256")):
                inner.pop(key, None)
        return plain

    @property
    def recipe_key(self) -> str:
        return hashlib.sha256(dump_json(self.recipe).encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        assert self.manifest is not None
        return self.manifest.data.fingerprint

    def evaluations(self) -> list[EvaluationRow]:
        """Return the run's evaluations, step by step."""
        path = self.path / "metrics.jsonl"
        return read_rows(EvaluationRow, path, [row for row in read_metrics(path, only='"val_loss"') if "val_loss" in row])

    def predictions(self) -> list[ExampleRow]:
        """Return a classifier's predictions of its final evaluation."""
        path = self.path / "predictions.jsonl"
        return read_rows(ExampleRow, path, read_metrics(path))

    def attention(self) -> AttentionRecord | None:
        """Return what the heads of the trained model do, where that was looked at."""
        path = self.path / "attention.json"
        return read_as(AttentionRecord, path) if path.is_file() else None


@dataclass(frozen=True)
class Mixture:
    """Why runs make no arm together: a code and its values, put into words elsewhere."""

    code: MixtureCode
    values: Mapping[str, int | Path | tuple[str, ...]]


@dataclass(frozen=True)
class Arm:
    """The finished runs of one experiment at one budget and variant, by seed; `refused` says why they give no figure."""

    experiment: str
    budget: str
    variant: str
    runs: tuple[Run, ...]
    unfinished: tuple[Run, ...]
    refused: Mixture | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.experiment, self.budget, self.variant

    @property
    def is_usable(self) -> bool:
        return bool(self.runs) and self.refused is None

    @property
    def best(self) -> dict[int, float]:
        """Each seed's headline: PPL or accuracy, at its best on validation."""
        return {run.seed: run.figures.best for run in self.runs if run.figures is not None}

    @property
    def metric(self) -> str:
        figures = self.runs[0].figures
        assert figures is not None
        return "ppl" if figures.best_ppl is not None else "accuracy"


def collect(roots: Sequence[Path], *, only: Some[str] = (), budgets: Some[str] = ()) -> list[Arm]:
    """Return every arm under the roots, in the order of their names; of one experiment and so on where `only` is given."""
    views: list[RunView] = []
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root}: no such folder; give the one that holds the runs (--out)")
        views += [view for view in scan(root, only=only) if not budgets or view.budget in budgets]
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for view in views:
        run = read_run(view)
        groups.setdefault((run.experiment, run.budget, run.variant), []).append(run)
    return [_arm(key, runs) for key, runs in sorted(groups.items())]


def read_run(view: RunView) -> Run:
    """Read what a report needs of a run; damage becomes its `problem`, never an exception."""
    parts: dict[str, Any] = {"config": None, "manifest": None, "audit": None, "figures": None}
    problem = ""
    try:
        parts["config"] = read_json(view.path / "config.json")
        if view.state == "done":
            parts["manifest"] = read_as(Manifest, view.path / "manifest.json")
            parts["audit"] = read_as(AuditRecord, view.path / "audit.json")
            parts["figures"] = read_as(Figures, view.path / "timing_stats.json")
        if not isinstance(parts["config"], dict):
            problem = "config.json is no object"
    except DataError as trouble:
        problem = str(trouble)
    return Run(
        experiment=view.experiment,
        budget=view.budget,
        variant=view.variant,
        seed=view.seed,
        path=view.path,
        state=view.state,
        message=view.status.message if view.status is not None else "",
        problem=problem,
        **parts,
    )


def _arm(key: tuple[str, str, str], runs: list[Run]) -> Arm:
    finished = sorted((run for run in runs if run.is_finished), key=lambda run: run.seed)
    rest = tuple(run for run in runs if not run.is_finished)
    return Arm(*key, runs=tuple(finished), unfinished=rest, refused=_mixture(finished))


def _mixture(runs: Sequence[Run]) -> Mixture | None:
    """Tell what forbids taking the runs for one arm: a seed twice, or runs that differ in more than the seed."""
    for first, second in zip(runs, runs[1:], strict=False):
        if first.seed == second.seed:
            return Mixture("seed_twice", {"seed": first.seed, "first": first.path, "second": second.path})
    for run in runs[1:]:
        both = {"first": runs[0].path, "second": run.path}
        if changes := recipe_differences(runs[0].recipe, run.recipe):
            return Mixture("recipes_differ", {**both, "settings": tuple(changes[:4])})
        if run.fingerprint != runs[0].fingerprint:
            return Mixture("data_differ", both)
    return None


def recipe_differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return in which settings two recipes differ: the dotted path and both values, without a word of any language."""
    old, new = _flat(first), _flat(second)
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [f"{key} ({old.get(key)} / {new.get(key)})" for key in keys]


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def load_runs(path: str | Path = "outputs") -> list[dict[str, Any]]:
    """Return every run under a folder as a flat row, for `pandas.DataFrame(oelm.load_runs("outputs"))`.

    Settings stand under their dotted path, figures under their names; what a run has not measured is None.
    """
    return [row for arm in collect([Path(path)]) for row in _rows((*arm.runs, *arm.unfinished))]


def _rows(runs: Iterable[Run]) -> Iterable[dict[str, Any]]:
    for run in sorted(runs, key=lambda run: run.seed):
        row: dict[str, Any] = {
            "experiment": run.experiment,
            "budget": run.budget,
            "variant": run.variant,
            "seed": run.seed,
            "state": run.state,
            "path": str(run.path),
            "problem": run.problem or run.message or None,
        }
        figures = run.figures.model_dump() if run.figures is not None else dict.fromkeys(Figures.model_fields)
        times, wall = figures.pop("step_s") or {}, figures.pop("wall_s") or {}
        row |= figures | {"step_s": times.get("median"), "wall_s": wall.get("total")}
        row |= {name: getattr(run.audit, name, None) for name in ("total", "trainable", "frozen")}
        row |= {"data": run.fingerprint if run.manifest is not None else None}
        yield row | {f"config.{key}": value for key, value in _flat(run.config or {}).items() if key != "seed"}
