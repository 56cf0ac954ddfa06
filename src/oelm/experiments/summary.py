"""What a queue of runs came to: figures by experiment, paired with the baseline by seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from oelm.experiments.plan import PlannedRun, confounds
from oelm.experiments.registry import Experiment
from oelm.intervals import Difference, Ratio, mean_difference, mean_ratio
from oelm.train.status import read_status


@dataclass(frozen=True)
class SummaryRow:
    """One experiment over its finished seeds; the gap is a ratio of PPLs or a difference of accuracies."""

    experiment: Experiment
    metric: str
    best: dict[int, float]
    gap: Ratio | Difference | None
    confounded: tuple[str, ...]

    @property
    def mean(self) -> float:
        values = list(self.best.values())
        return statistics.geometric_mean(values) if self.metric == "ppl" else statistics.fmean(values)


def summarize(runs: Sequence[PlannedRun]) -> list[SummaryRow]:
    """Return a row for each experiment with a finished run, each behind its baseline."""
    best: dict[str, dict[int, float]] = {}
    metrics: dict[str, str] = {}
    first: dict[str, PlannedRun] = {}
    for run in runs:
        first.setdefault(run.experiment.id, run)
        status = read_status(run.path)
        if status is not None and status.status == "done" and status.best is not None:
            best.setdefault(run.experiment.id, {})[run.seed] = status.best
            metrics[run.experiment.id] = status.metric
    rows = []
    for name, values in sorted(best.items(), key=lambda item: _place(first[item[0]].experiment, list(first))):
        run = first[name]
        other = run.experiment.baseline or ""
        apart = tuple(confounds(run.config, first[other].config, tuned=run.tuned)) if other in first else ()
        gap = _gap(metrics[name], values, best.get(other, {}))
        rows.append(SummaryRow(run.experiment, metrics[name], dict(sorted(values.items())), gap, apart))
    return rows


def _place(experiment: Experiment, order: list[str]) -> tuple[int, bool, int]:
    leader = experiment.baseline if experiment.baseline in order else experiment.id
    return order.index(leader), leader != experiment.id, order.index(experiment.id)


def _gap(metric: str, ours: dict[int, float], theirs: dict[int, float]) -> Ratio | Difference | None:
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    pair = [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
    return mean_ratio(*pair) if metric == "ppl" else mean_difference(*pair)


def gap_text(gap: Ratio | Difference | None) -> str:
    """Return '+9.8% [+8.0, +11.6]' for PPLs, '-4.6 points [...]' for accuracies; no interval for one seed."""
    if gap is None:
        return ""
    if isinstance(gap, Ratio):
        value, low, high = (100 * (number - 1) for number in (gap.value, gap.low, gap.high))
        unit = "%"
    else:
        value, low, high = (100 * number for number in (gap.value, gap.low, gap.high))
        unit = " points"
    interval = "" if gap.count < 2 else f" [{low:+.1f}, {high:+.1f}]"
    return f"{value:+.1f}{unit}{interval}"


def figure_text(metric: str, value: float | None) -> str:
    """Return a best figure as people read it."""
    if value is None:
        return ""
    return f"{value:.2f}" if metric == "ppl" else f"{100 * value:.2f}%"
