"""How arms learn: curves with bands over seeds, and how much text and time each needs to a given quality."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

from oelm.report.collect import Arm, FinishedRun
from oelm.report.document import Block, Cell, Chart, Section, Table, Text
from oelm.report.findings import Findings, Pair, label
from oelm.report.plots import curves
from oelm.report.words import Words

# As many as the catalog has at a budget. Of hundreds of pictures nobody looks at one, and each takes a tenth of a second.
_MOST_FAMILIES = 8
# With fewer, an arm that needs a third less text to the same quality would look like one that needs as much.
_LEAST_EVALUATIONS = 4


def learning_section(findings: Findings, words: Words) -> Section | None:
    """Return the learning curves of every family of arms."""
    blocks: list[Block] = []
    families = findings.by_weight()
    for number, arms in enumerate(families[:_MOST_FAMILIES]):
        baseline = arms[0]
        rows = [row for arm in arms for row in band(label(arm), [run.curve for run in arm.runs], least=len(arm.runs))]
        if not rows:
            continue
        title = words("learning.caption", baseline=label(baseline), budget=baseline.budget)
        names = [label(arm) for arm in arms]
        metric = words("loss.nats") if baseline.metric == "ppl" else words("loss.example")
        spec = curves(rows, names, x=words("step"), y=metric)
        blocks.append(Chart(f"learning-{number}", title, spec, words("learning.alt", arms=words.listed(names))))
    if not blocks:
        return None
    left_out = len(families[_MOST_FAMILIES:])
    blocks += [Text(words("pictures.left_out", count=left_out), "note")] if left_out else []
    return Section("learning", words("learning.title"), (Text(words("learning.text")), *blocks))


def band(name: str, curves: Iterable[Mapping[int, float]], *, least: int) -> list[dict[str, object]]:
    """Return mean, lowest and highest validation loss over seeds, at every step that at least so many of them have."""
    losses: dict[int, list[float]] = defaultdict(list)
    for curve in curves:
        for step, loss in curve.items():
            losses[step].append(loss)
    return [
        {
            "arm": name,
            "step": step,
            "mean": statistics.fmean(values),
            "low": min(values),
            "high": max(values),
            "seeds": len(values),
        }
        for step, values in sorted(losses.items())
        if len(values) >= least
    ]


def reach_section(findings: Findings, words: Words) -> Section | None:
    """Return how many tokens and minutes each arm needs to reach the quality that the worst of its family reaches."""
    families = findings.families
    told = [(baseline, pairs) for baseline, pairs in families if _is_resolved([baseline, *(pair.arm for pair in pairs)])]
    rows = [row for baseline, pairs in told for row in _reach_rows(baseline, pairs, words)]
    if not rows:
        return None
    left_out = [label(baseline) for baseline, pairs in families if (baseline, pairs) not in told]
    note = words("reach.left_out", families=words.listed(left_out), least=_LEAST_EVALUATIONS)
    columns = tuple(words(f"reach.{name}") for name in ("arm", "budget", "target", "steps", "tokens", "minutes", "against"))
    table = Table("reach", words("reach.caption"), columns, tuple(rows), frozenset(range(2, 7)))
    notes = (Text(note, "note"),) if left_out else ()
    return Section("reach", words("reach.title"), (Text(words("reach.text")), table, *notes))


def _is_resolved(arms: list[Arm]) -> bool:
    return all(len(run.curve) >= _LEAST_EVALUATIONS for arm in arms for run in arm.runs)


def _reach_rows(baseline: Arm, pairs: list[Pair], words: Words) -> list[tuple[Cell, ...]]:
    arms = [baseline, *(pair.arm for pair in pairs)]
    target = max(_final(arm) for arm in arms)
    reached = {arm.key: _reach(arm, target) for arm in arms}
    rows: list[tuple[Cell, ...]] = []
    for arm in arms:
        steps, tokens, minutes = reached[arm.key]
        against = steps / reached[baseline.key][0]
        rows.append(
            (
                Cell(label(arm)),
                Cell(arm.budget),
                Cell(f"{target:.4f}", target),
                Cell(f"{steps:,.0f}", steps),
                Cell(f"{tokens / 1e6:.2f}M", tokens),
                Cell(f"{minutes:.1f}", minutes),
                Cell(f"{against:.2f}x", against),
            )
        )
    return rows


def _final(arm: Arm) -> float:
    """Return the mean over seeds of the best validation loss."""
    return statistics.fmean(run.figures.best_val_loss for run in arm.runs)


def _reach(arm: Arm, target: float) -> tuple[float, float, float]:
    """Return steps, tokens and minutes to the first evaluation at the target or below, means over seeds."""
    # The target is a mean: a seed may stay above what its arm reaches on the whole, and counts with all its steps.
    steps = [_first_at(run, target) or _last(run) for run in arm.runs]
    spent = [(step, *_per_step(run)) for step, run in zip(steps, arm.runs, strict=True)]
    tokens = statistics.fmean(step * per_step for step, per_step, _ in spent)
    minutes = statistics.fmean(step * seconds / 60 for step, _, seconds in spent)
    return statistics.fmean(steps), tokens, minutes


def _first_at(run: FinishedRun, target: float) -> int | None:
    return next((step for step, loss in sorted(run.curve.items()) if loss <= target), None)


def _last(run: FinishedRun) -> int:
    return max(run.curve)


def _per_step(run: FinishedRun) -> tuple[float, float]:
    """Return tokens and seconds that a run spent on each of its steps, everything included."""
    steps = _last(run)
    return run.figures.tokens / steps, run.figures.wall_s["total"] / steps
