"""How far running and finished runs are from their baselines so far."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oelm.runs.find import RunView
from oelm.runs.metrics import evaluations
from oelm.runs.status import Metric, Status, read_status

_COLUMN: dict[Metric, str] = {"ppl": "val_ppl", "accuracy": "val_accuracy"}


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a run is from its baseline, and at which step; '%' of perplexity, or points of accuracy."""

    value: float
    unit: Literal["%", "pt"]
    step: int


def gaps(views: Sequence[RunView], baselines: Mapping[str, str]) -> list[Gap | None]:
    """Return each run's distance from the baseline's run of the same budget, variant and seed, where it can be told."""
    known = {(view.experiment, view.budget, view.variant, view.seed): view.status for view in views}
    return [_gap(view, baselines.get(view.experiment), known) for view in views]


def _gap(view: RunView, baseline: str | None, known: Mapping[tuple[str, str, str, int], Status | None]) -> Gap | None:
    ours = view.status
    if baseline is None or ours is None or ours.metric not in _COLUMN or ours.best is None:
        return None
    key = (baseline, view.budget, view.variant, view.seed)
    other = _counterpart(view, baseline)
    theirs = known[key] if key in known else read_status(other)
    if theirs is None or theirs.metric != ours.metric or theirs.best is None:
        return None
    if ours.status == theirs.status == "done" and ours.steps == theirs.steps:
        return _difference(ours.best, theirs.best, ours.metric, step=ours.steps)
    # The best so far of the one that is further on would flatter it: only the same step compares.
    here, there = evaluations(view.folder), evaluations(other)
    step = max(here.keys() & there.keys(), default=None)
    column = _COLUMN[ours.metric]
    return None if step is None else _difference(here[step].get(column), there[step].get(column), ours.metric, step=step)


def _counterpart(view: RunView, baseline: str) -> str:
    return os.path.join(view.folder.rsplit(os.sep, 4)[0] or os.sep, baseline, view.budget, view.variant, f"seed-{view.seed}")


def _difference(ours: Any, theirs: Any, metric: Metric, *, step: int) -> Gap | None:
    if not (is_number(ours) and is_number(theirs)):
        return None
    if metric == "accuracy":
        return Gap(100 * (ours - theirs), "pt", step)
    percent = 100 * (ours / theirs - 1) if theirs > 0 else math.nan
    return Gap(percent, "%", step) if math.isfinite(percent) else None


def is_number(value: Any) -> bool:
    """Whether a value from a file is a number that sums and differences can be made of."""
    return isinstance(value, int | float) and abs(value) < 1e300
