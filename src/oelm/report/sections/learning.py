"""How arms learn: curves with bands over seeds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from oelm.report.charts import curves
from oelm.report.document import Block, Chart, Section, Text
from oelm.report.pairs import Findings, label
from oelm.report.words import Words

# As many as the catalog has at a budget. Of hundreds of pictures nobody looks at one, and each takes a tenth of a second.
_MOST_FAMILIES = 8
# What keeps a page that is sent again and again small, and readable.
_MOST_CURVES, _MOST_POINTS = 8, 20


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


def small_chart(
    name: str, arms: Mapping[str, Sequence[Mapping[int, float]]], words: Words, *, caption: str, y: str
) -> Chart | None:
    """Return the curves of arms by seed as a chart of few points; its caption counts the arms that are not drawn."""
    drawn = dict(list(arms.items())[:_MOST_CURVES])
    rows = [row for arm, own in drawn.items() for row in _thinned(band(arm, own, least=1))]
    if not rows:
        return None
    if left_out := len(arms) - len(drawn):
        caption = words("sentence.separator").join([caption, words("live.curves_left_out", count=left_out)])
    spec = curves(rows, list(drawn), x=words("step"), y=y, points=len(rows) <= 4 * len(drawn))
    return Chart(name, caption, spec, words("learning.alt_of", metric=y, arms=words.listed(drawn)))


def _thinned(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Return at most this many rows, evenly spaced, including the last."""
    every = -(-len(rows) // _MOST_POINTS)
    return list(rows[::-1][::every][::-1]) if every > 1 else list(rows)
