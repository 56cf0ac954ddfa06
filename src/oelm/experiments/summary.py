"""What a queue of runs came to: figures by experiment, paired with the baseline by seed."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from oelm.experiments.catalog import Experiment
from oelm.experiments.plan import PlannedRun, config_confounds
from oelm.runs.layout import EvaluatedSplit
from oelm.runs.records import recorded_figure
from oelm.runs.status import read_status
from oelm.stats import PairedGap, paired_gap


@dataclass(frozen=True)
class SummaryRow:
    """One experiment over its finished seeds, and its gap to the baseline.

    `best` is each seed's figure on `split`, with the model that was best on validation. `majority` is what always naming the
    largest class comes to there; None for a language model.
    """

    experiment: Experiment
    metric: str
    best: dict[int, float]
    gap: PairedGap
    confounded: tuple[str, ...]
    split: EvaluatedSplit
    majority: float | None = None

    @property
    def mean(self) -> float:
        values = list(self.best.values())
        return statistics.geometric_mean(values) if self.metric == "ppl" else statistics.fmean(values)


def summarize(runs: Sequence[PlannedRun]) -> list[SummaryRow]:
    """Return a row for each experiment with a finished run, after its baseline.

    A baseline and its arms use the test split if all of their finished runs have a figure on it, else validation.
    """
    best: dict[str, dict[int, float]] = {}
    tested: dict[str, dict[int, float]] = {}
    metrics: dict[str, str] = {}
    first: dict[str, PlannedRun] = {}
    for run in runs:
        first.setdefault(run.experiment.id, run)
        status = read_status(run.path)
        if status is not None and status.status == "done" and status.best is not None:
            best.setdefault(run.experiment.id, {})[run.seed] = status.best
            metrics[run.experiment.id] = status.metric
            if (figure := recorded_figure(run.path, f"test_{status.metric}")) is not None:
                tested.setdefault(run.experiment.id, {})[run.seed] = figure
    splits = {name: _split(name, first, best, tested) for name in best}
    best = {name: tested[name] if splits[name] == "test" else values for name, values in best.items()}
    rows = []
    for name, values in sorted(best.items(), key=lambda item: _place(first[item[0]].experiment, list(first))):
        run = first[name]
        other = run.experiment.baseline or ""
        apart = tuple(config_confounds(run.config, first[other].config, tuned=run.tuned)) if other in first else ()
        gap = paired_gap(values, best.get(other, {}), metrics[name])
        finished = next(other for other in runs if other.experiment.id == name and other.seed in values)
        share = recorded_figure(finished.path, "test_majority_accuracy" if splits[name] == "test" else "majority_accuracy")
        rows.append(SummaryRow(run.experiment, metrics[name], dict(sorted(values.items())), gap, apart, splits[name], share))
    return rows


def _split(
    name: str, first: dict[str, PlannedRun], best: dict[str, dict[int, float]], tested: dict[str, dict[int, float]]
) -> EvaluatedSplit:
    """Return the split that an experiment shares with its baseline and the other arms."""
    leader = _leader(first[name].experiment, first)
    family = [other for other in best if _leader(first[other].experiment, first) == leader]
    return "test" if all(tested.get(other, {}).keys() == best[other].keys() for other in family) else "val"


def split_note(rows: Sequence[SummaryRow]) -> str:
    """Describe what the figures of a summary are measured on."""
    tested = [row.experiment.id for row in rows if row.split == "test"]
    if len(tested) == len(rows):
        return "on test, with the model that was best on validation, mean over seeds"
    others = f"; on test with that model: {', '.join(tested)}" if tested else ""
    return f"best on validation, mean over seeds{others}"


def _place(experiment: Experiment, order: list[str]) -> tuple[int, bool, int]:
    leader = _leader(experiment, order)
    return order.index(leader), leader != experiment.id, order.index(experiment.id)


def _leader(experiment: Experiment, among: Collection[str]) -> str:
    return experiment.baseline if experiment.baseline in among and experiment.baseline is not None else experiment.id
