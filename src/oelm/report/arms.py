"""Runs as a report sees them: read robustly, grouped by everything but the seed, and never mixed."""

from __future__ import annotations

import itertools
import os
import re
import statistics
from collections import Counter
from collections.abc import Collection as Some
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from oelm.budget import BUDGETS
from oelm.config import flatten, with_defaults
from oelm.errors import ConfigError, DataError, suggest
from oelm.experiments.importer import IMPORTED, ImportedRun, load_imported, record_path
from oelm.experiments.plan import is_tuned_alone
from oelm.runs.find import ArmKey, RunView, scan, scan_flat
from oelm.runs.finished import Finished, read_finished, read_settings
from oelm.runs.layout import CONFIG, PREDICTIONS, EvaluatedSplit
from oelm.runs.metrics import read_jsonl
from oelm.runs.records import DocumentRow, ExampleRow, Figures, Manifest, majority_share, read_rows
from oelm.stats import Metric

# Mostly "auto" in a config, so the config does not show whether runs differ in them.
COMPUTED_WITH = ("device", "precision")
# What may change a run's figures in their last digits, so that seeds of one arm should share it.
MIXED = ("source_revision", "torch", "threads")


def computed_with(config: Mapping[str, Any], manifest: Manifest) -> dict[str, str]:
    """Return device and precision of all sessions together ("cpu+cuda"), each where it is known."""
    sessions = [manifest.environment, *(session.get("environment") for session in manifest.earlier)]
    found = {}
    for name in COMPUTED_WITH:
        # Without a value in the manifest, the config's value counts, unless it is "auto".
        told = _texts(name, sessions) or _texts(name, [config])
        if told:
            # The manifest has a GPU's product name, or cuda:0 and the like.
            kinds = {text if text in ("cpu", "mps") else "cuda" for text in told} if name == "device" else told
            found[name] = "+".join(sorted(kinds))
    return found


def sittings_with(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return the revisions, torch versions and thread counts of all sessions, each where it is known."""
    first = {"source_revision": manifest.source_revision, "torch": manifest.torch, "environment": manifest.environment}
    sessions = [first, *manifest.earlier]
    places = {"threads": [session.get("environment") for session in sessions]}
    return {name: tuple(sorted(_texts(name, places.get(name, sessions)))) for name in MIXED}


def _texts(name: str, places: Sequence[Any]) -> set[str]:
    texts = {place[name] for place in places if isinstance(place, Mapping) and isinstance(place.get(name), str)}
    return texts - {"", "auto"}


def known_differences(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return how the computing environments of runs differ; an unknown value is no difference."""
    return {name: (first[name], second[name]) for name in first if name in second and first[name] != second[name]}


# Settings that are paths: digest and fingerprint identify weights and data.
_PLACES = (("model", "source"), ("examples", "folder"))
# How the name of a variant ends: of its changes.
_DIGEST = re.compile(r"-[0-9a-f]{8}$")
MixtureCode = Literal["seed_twice", "seeds_alike", "recipes_differ", "data_differ"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One recorded run, whatever its state; `problem` says why a run that is done cannot be used."""

    experiment: str
    budget: str
    variant: str
    seed: int
    path: Path
    state: str
    message: str
    config: dict[str, Any] | None
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.budget}/{self.variant}/seed-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class FinishedRun(Finished, Run):
    """A run whose records are all readable and agree with each other."""

    config: dict[str, Any]

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The config without the seed, the paths of what a digest identifies, and what `computed_with` knows better."""
        kept = {key: value for key, value in self.config.items() if key not in ("seed", *COMPUTED_WITH)}
        plain = {key: dict(value) if isinstance(value, dict) else value for key, value in kept.items()}
        for section, key in _PLACES:
            inner = plain.get(section)
            if isinstance(inner, dict) and (section != "model" or inner.get("sha256")):
                inner.pop(key, None)
        return plain

    @cached_property
    def computed_with(self) -> dict[str, str]:
        """The kind of device and the precision in force, each where it is known."""
        return computed_with(self.config, self.manifest)

    @property
    def fingerprint(self) -> str:
        return self.manifest.data.fingerprint

    @property
    def metric(self) -> Metric:
        return "ppl" if self.figures.best_ppl is not None else "accuracy"

    def majority(self, split: EvaluatedSplit) -> float | None:
        """Return the share of the largest class of a split, where it was measured or the answers are stored."""
        if self.metric == "ppl":
            return None
        known = self.figures.majority_on(split)
        if known is not None or not (self.path / PREDICTIONS[split]).is_file():
            return known
        return majority_share([row.label for row in self.predictions(split)])

    def predictions(self, split: EvaluatedSplit) -> list[ExampleRow]:
        """Return a classifier's answers: on validation those of its final model, on test those of its best."""
        path = self.path / PREDICTIONS[split]
        return read_rows(ExampleRow, path, read_jsonl(path))

    def documents(self, split: EvaluatedSplit) -> list[DocumentRow]:
        """Return a language model's loss on every document: on validation of its final model, on test of its best."""
        path = self.path / PREDICTIONS[split]
        return read_rows(DocumentRow, path, read_jsonl(path))


@dataclass(frozen=True)
class Mixture:
    """Why runs make no arm together: a code and its values, put into words elsewhere."""

    code: MixtureCode
    values: Mapping[str, int | Path | tuple[str, ...]]


@dataclass(frozen=True)
class Arm:
    """The finished runs of one experiment at one budget and variant, by seed; `refused` says why they give no figure.

    `shown` is the variant as readers see it.
    """

    experiment: str
    budget: str
    variant: str
    runs: tuple[FinishedRun, ...]
    unfinished: tuple[Run, ...]
    refused: Mixture | None = None
    shown: str = ""

    @property
    def key(self) -> ArmKey:
        return self.experiment, self.budget, self.variant

    @property
    def first(self) -> FinishedRun:
        """The first run of an arm that has one: what all its runs share can be read off it."""
        return self.runs[0]

    @property
    def method(self) -> dict[str, Any]:
        """The method of its config, as stored."""
        found: dict[str, Any] = self.first.config.get("method", {})
        return found

    @property
    def data(self) -> str:
        return self.first.manifest.data.name

    @property
    def metric(self) -> Metric:
        return self.first.metric

    @property
    def computed_with(self) -> dict[str, str]:
        """Device and precision of its runs, which agree as far as known."""
        return {name: value for run in self.runs for name, value in run.computed_with.items()}

    @property
    def mixed(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """What its runs were made with that is not the same for all: the seeds by revision, torch version or thread count."""
        seeds: dict[str, dict[str, list[int]]] = {}
        for run in self.runs:
            for name, values in sittings_with(run.manifest).items():
                for value in values:
                    seeds.setdefault(name, {}).setdefault(value, []).append(run.seed)
        return {name: {value: tuple(own) for value, own in by.items()} for name, by in seeds.items() if len(by) > 1}

    @property
    def refused_seeds(self) -> tuple[int, ...]:
        """Finished seeds whose records cannot be used."""
        return tuple(sorted(run.seed for run in self.unfinished if run.problem))

    @property
    def is_usable(self) -> bool:
        return bool(self.runs) and self.refused is None

    @property
    def best(self) -> dict[int, float]:
        """Each seed's headline: PPL or accuracy, at its best on validation."""
        return self.on("val")

    def on(self, split: EvaluatedSplit) -> dict[int, float]:
        """Return each seed's headline on a split, where it was measured: of the model that was best on validation."""
        found = {run.seed: run.figures.on(split) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    def majority(self, split: EvaluatedSplit) -> float | None:
        """Return what naming the largest class always comes to on a split: the same for all runs of an arm."""
        return next((share for run in self.runs if (share := run.majority(split)) is not None), None)

    def mean(self, split: EvaluatedSplit) -> float:
        """Return the mean over seeds on a split: of PPLs the geometric one, as gaps are ratios; of accuracies the plain one."""
        return mean_figure(self.on(split).values(), self.metric)


def mean_figure(values: Iterable[float], metric: Metric) -> float:
    """Return the geometric mean of PPLs, or the plain mean of accuracies."""
    return statistics.geometric_mean(values) if metric == "ppl" else statistics.fmean(values)


def common_split(*arms: Arm) -> EvaluatedSplit:
    """Return the split that arms are compared on: test if every run has test figures, else validation."""
    return "test" if all(len(arm.on("test")) == len(arm.runs) for arm in arms) else "val"


def collect(roots: Sequence[Path], *, only: Some[str] = (), budgets: Some[str] = ()) -> list[Arm]:
    """Return every arm under the roots, in the order of their names; of one experiment and so on where `only` is given."""
    views: list[RunView] = []
    for root in roots:
        if not root.is_dir():
            raise ConfigError(f"{root}: no such folder; give the one that holds the runs (--out)")
        views += scan(root, only=only)
    _check_budgets(budgets, {view.budget for view in views})
    return arms_of(read_run(view) for view in views if not budgets or view.budget in budgets)


def arms_of(runs: Iterable[Run]) -> list[Arm]:
    """Return runs as arms, in the order of their names."""
    groups: dict[ArmKey, list[Run]] = {}
    for run in map(_in_its_place, runs):
        groups.setdefault((run.experiment, run.budget, run.variant), []).append(run)
    shown = _shown(groups)
    return [replace(_arm(key, runs), shown=shown[key]) for key, runs in sorted(groups.items())]


def _shown(keys: Iterable[ArmKey]) -> dict[ArmKey, str]:
    """Return the name of each variant for readers: without its digest, unless two variants would look alike."""
    keys = list(keys)
    tuned = Counter(key[:2] for key in keys if is_tuned_alone(key[2]))
    stems = {variant: _DIGEST.sub("", variant) for variant in {key[2] for key in keys}}
    alike = Counter(stems.values())
    is_alone = {key: (tuned[key[:2]] if is_tuned_alone(key[2]) else alike[stems[key[2]]]) == 1 for key in keys}
    return {key: stems[key[2]] if is_alone[key] else key[2] for key in keys}


def _check_budgets(wanted: Some[str], found: set[str]) -> None:
    known = {*BUDGETS, *found}
    for budget in wanted:
        if budget not in known:
            names = ", ".join((*BUDGETS, *sorted(found - {*BUDGETS})))
            raise ConfigError(f"no budget called {budget!r}{suggest(budget, known)}; choose one of {names}")


def read_run(view: RunView) -> Run:
    """Read what a report needs of a run; damage becomes its `problem`, never an exception."""
    found: dict[str, Any] = {name: getattr(view, name) for name in ("experiment", "budget", "variant", "seed", "path", "state")}
    found["message"] = view.status.message if view.status is not None else ""
    config: dict[str, Any] | None = None
    try:
        config = read_settings(view.path)
        if view.state == "done":
            return FinishedRun(**found, config=config, **vars(read_finished(view.path, config)))
    except DataError as problem:
        return Run(**found, config=config, problem=str(problem))
    return Run(**found, config=config)


def _in_its_place(run: Run) -> Run:
    """Return a run with a problem where its folder is another seed's: a copy would count as one more seed."""
    if run.problem or run.config is None or run.config.get("seed") == run.seed:
        return run
    found = run.config.get("seed")
    return replace(run, problem=f"{run.path / CONFIG}: has the seed {found}, and the folder is that of seed {run.seed}")


def _arm(key: ArmKey, runs: list[Run]) -> Arm:
    usable = [run for run in runs if isinstance(run, FinishedRun) and not run.problem]
    finished = sorted(usable, key=lambda run: run.seed)
    rest = tuple(run for run in runs if run.problem or not isinstance(run, FinishedRun))
    return Arm(*key, runs=tuple(finished), unfinished=rest, refused=_mixture(finished))


def _mixture(runs: Sequence[FinishedRun]) -> Mixture | None:
    """Return why the runs are not one arm: a seed twice, or runs that differ in more than the seed."""
    for first, second in zip(runs, runs[1:], strict=False):
        if first.seed == second.seed:
            return Mixture("seed_twice", {"seed": first.seed, "first": first.path, "second": second.path})
    # No two seeds give the same loss to the last bit: one of them is a copy.
    known: dict[tuple[tuple[int, float], ...], FinishedRun] = {}
    for run in runs:
        if (first := known.setdefault(tuple(run.curve.items()), run)) is not run:
            return Mixture("seeds_alike", {"first": first.path, "second": run.path})
    for run in runs[1:]:
        both = {"first": runs[0].path, "second": run.path}
        if changes := recipe_differences(runs[0].recipe, run.recipe):
            return Mixture("recipes_differ", {**both, "settings": tuple(changes[:4])})
        if run.fingerprint != runs[0].fingerprint:
            return Mixture("data_differ", both)
    return _computed_apart(runs)


def _computed_apart(runs: Sequence[FinishedRun]) -> Mixture | None:
    """Return the runs with another device or precision than the first run where that is known."""
    known: dict[str, FinishedRun] = {}
    for run in runs:
        seen = {name: first.computed_with[name] for name, first in known.items()}
        if apart := known_differences(seen, run.computed_with):
            changes = tuple(difference_text(name, values) for name, values in apart.items())
            return Mixture("recipes_differ", {"first": known[next(iter(apart))].path, "second": run.path, "settings": changes})
        known = dict.fromkeys(run.computed_with, run) | known
    return None


def run_differences(first: FinishedRun, second: FinishedRun) -> list[str]:
    """Return in what two runs differ besides the seed: settings, device and precision, data."""
    changes = recipe_differences(first.recipe, second.recipe)
    changes += [difference_text(*each) for each in known_differences(first.computed_with, second.computed_with).items()]
    return changes + data_difference(first, second)


def data_difference(first: FinishedRun, second: FinishedRun) -> list[str]:
    """Return that two runs were trained on different data, where they were."""
    if first.fingerprint == second.fingerprint:
        return []
    return [difference_text("data.fingerprint", (first.fingerprint[:8], second.fingerprint[:8]))]


def recipe_differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return in which settings two recipes differ: the dotted path and both values, without a word of any language."""
    return [difference_text(key, values) for key, values in differing_settings(first, second).items()]


def difference_text(key: str, values: tuple[Any, Any]) -> str:
    """Return the text for a setting in which two runs differ."""
    return f"{key} ({values[0]} / {values[1]})"


def differing_settings(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two recipes differ, by dotted path, with both values.

    A setting that a record lacks has its default: a later version than the record's made it.
    """
    old, new = flatten(first), flatten(second)
    if _lacks(old, new) or _lacks(new, old):
        old, new = with_defaults(first), with_defaults(second)
    both = {key: (old.get(key), new.get(key)) for key in {**old, **new}}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _lacks(settings: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether settings are without one of the others; neither `thaw: null` nor `thaw.start` is without the other."""
    sections = {above for key in settings for above in _above(key)}
    missing = others.keys() - settings.keys() - sections
    return any(settings.keys().isdisjoint(_above(key)) for key in missing)


def _above(key: str) -> list[str]:
    """Return the sections that a setting is in, by their dotted paths."""
    return list(itertools.accumulate(key.split(".")[:-1], "{}.{}".format))


@dataclass(frozen=True)
class ImportedStudy:
    """The runs of other tools that were imported under one name: by arm and seed."""

    root: Path
    name: str
    arms: Mapping[str, Mapping[int, ImportedRun]]

    @property
    def metrics(self) -> list[str]:
        """What its runs measured, all of them together."""
        return sorted({metric for runs in self.arms.values() for run in runs.values() for metric in run.curves})


def collect_imported(roots: Sequence[Path]) -> list[ImportedStudy]:
    """Return every imported study under the roots, in the order of their names; DataError where a record is damaged."""
    found: dict[tuple[str, Path], dict[str, dict[int, ImportedRun]]] = {}
    for root in roots:
        for run in load_imported(root):
            found.setdefault((run.study, root), {}).setdefault(run.arm, {})[run.seed] = run
    return [ImportedStudy(root, name, arms) for (name, root), arms in sorted(found.items(), key=lambda study: study[0][0])]


def load_runs(path: str | Path = "outputs") -> list[dict[str, Any]]:
    """Return every run under a folder as a flat row, for `pandas.DataFrame(oelm.load_runs("outputs"))`.

    The folder may be a run, hold runs of `oelm train --out` directly, or hold experiments. Settings are under their dotted
    path, figures under their names; what a run has not measured is None. Imported runs come last, each metric's last value
    under `imported.<metric>`.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"load_runs takes the path of a folder, not {path!r} ({type(path).__name__})")
    rows = [row for arm in collect([Path(path)]) for row in _rows((*arm.runs, *arm.unfinished))]
    # Where `oelm train --out` put them: their folders name no experiment.
    rows += [row for view in scan_flat(Path(path)) for row in _rows([_alone(read_run(view))])]
    return rows + [_imported_row(run, Path(path)) for run in load_imported(Path(path))]


def _alone(run: Run) -> Run:
    """Return a run with the seed of its config and without the names of an experiment, where its folder gives none."""
    if run.path.name.startswith("seed-"):
        return run
    seed = (run.config or {}).get("seed", run.seed)
    return replace(run, experiment="", budget="", variant="", seed=seed)


def _imported_row(run: ImportedRun, root: Path) -> dict[str, Any]:
    """Return a run of another tool as a row: its study and arm where ours have experiment and variant, and its last values."""
    place = {"experiment": run.study, "budget": IMPORTED, "variant": run.arm, "seed": run.seed, "state": IMPORTED}
    values = {f"{IMPORTED}.{metric}": points[-1][1] for metric, points in run.curves.items()}
    return {**place, "path": str(record_path(root, run)), "problem": None, **values}


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
        whole = run if isinstance(run, FinishedRun) else None
        figures = dict.fromkeys(Figures.model_fields) if whole is None else whole.figures.model_dump()
        times, wall, energy = (figures.pop(name) or {} for name in ("step_s", "wall_s", "energy_j"))
        row |= figures | {"step_s": times.get("median"), "wall_s": wall.get("total")}
        row |= {"energy_j": sum(energy.values()) if energy else None}
        row |= {name: getattr(whole and whole.audit, name, None) for name in ("total", "trainable", "frozen")}
        row |= {"data": None if whole is None else whole.fingerprint}
        yield row | {f"config.{key}": value for key, value in flatten(run.config or {}).items() if key != "seed"}
