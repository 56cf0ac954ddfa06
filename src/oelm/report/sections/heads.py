"""Why it happens: what the heads of trained models do, layer by layer; and whether arms were tuned alike."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oelm.config import flatten
from oelm.experiments.plan import CLOSE, TUNED, is_tuned_alone, variant_name
from oelm.report.arms import Arm
from oelm.report.charts import grouped
from oelm.report.document import Block, Cell, Chart, Section, Table, Text
from oelm.report.pairs import Findings, label
from oelm.report.words import Words

if TYPE_CHECKING:
    from oelm.experiments.sweep import SweepRecord

# Five pictures each.
_MOST_FAMILIES = 4
MEASURES = ("entropy", "logit_std", "mean_distance", "effective_rank", "induction")


def why_section(findings: Findings, words: Words) -> Section | None:
    """Return what heads do in every arm, from attention.json: means over heads, spread over seeds."""
    blocks: list[Block] = []
    looked_at = [arms for arms in findings.by_weight() if any(run.heads for arm in arms for run in arm.runs)]
    for number, arms in enumerate(looked_at[:_MOST_FAMILIES]):
        baseline = arms[0]
        for measure in MEASURES:
            rows = [row for arm in arms for row in _by_layer(arm, measure)]
            names = [label(arm) for arm in arms]
            spec = grouped(rows, names, x=words("why.layer"), y=words(f"why.{measure}"))
            caption = words("why.caption", measure=words(f"why.{measure}"), family=label(baseline), budget=baseline.budget)
            blocks.append(Chart(f"why-{number}-{measure}", caption, spec, words("why.alt", arms=words.listed(names))))
    if not blocks:
        return None
    blocks.append(_heads([arm for arms in looked_at for arm in arms], words))
    left_out = len(looked_at[_MOST_FAMILIES:])
    blocks += [Text(words("pictures.left_out", count=left_out), "note")] if left_out else []
    return Section("why", words("why.title"), (Text(words("why.text")), *blocks))


def _heads(arms: Sequence[Arm], words: Words) -> Table:
    """Return the means of the pictures as numbers, of all families: a row for each arm and measure, a column for each layer."""
    layers = sorted({layer for arm in arms for run in arm.runs for means in run.heads.values() for layer in means})
    rows = []
    for arm in {arm.key: arm for arm in arms}.values():
        for measure in MEASURES:
            means = {row["group"]: float(str(row["mean"])) for row in _by_layer(arm, measure)}
            cells = (Cell(f"{means[str(n)]:.2f}", means[str(n)]) if str(n) in means else Cell("") for n in layers)
            if means:
                seen = sum(measure in run.heads for run in arm.runs)
                rows.append((Cell(label(arm)), Cell(arm.budget), Cell(str(seen), seen), Cell(words(f"why.{measure}")), *cells))
    named = (words(f"why.{name}") for name in ("arm", "budget", "seeds", "measure"))
    columns = (*named, *(f"{words('why.layer')} {n}" for n in layers))
    return Table("heads", words("why.heads"), columns, tuple(rows), frozenset({2, *range(4, len(columns))}))


def _by_layer(arm: Arm, measure: str) -> list[dict[str, object]]:
    values: dict[int, list[float]] = defaultdict(list)
    for run in arm.runs:
        for layer, mean in run.heads.get(measure, {}).items():
            values[layer].append(mean)
    return [
        {"arm": label(arm), "group": str(layer), "mean": statistics.fmean(found), "low": min(found), "high": max(found)}
        for layer, found in sorted(values.items())
    ]


def tuning_section(findings: Findings, words: Words) -> Section | None:
    """Return the sweeps behind the arms: the same grid for all, the best of each, and whether it is at the edge."""
    sweeps: list[SweepRecord] = []
    for sweep in (found[0] for arm in findings.arms if (found := findings.sweeps.of(arm))):
        sweeps += [] if sweep in sweeps else [sweep]
    rows = [row for sweep in sweeps for row in _sweep_rows(sweep, words)]
    if not rows:
        return None
    columns = tuple(words(f"tuning.{name}") for name in ("arm", "budget", "setting", "score", "seeds", "remark"))
    blocks: list[Block] = [Text(words("tuning.text", close=CLOSE))]
    blocks.append(Table("tuning", words("tuning.caption"), columns, tuple(rows), frozenset({3, 4})))
    blocks += [Text(text, "note") for text in _swept_otherwise(findings, words)]
    return Section("tuning", words("tuning.title"), tuple(blocks))


def _sweep_rows(sweep: SweepRecord, words: Words) -> list[tuple[Cell, ...]]:
    """Return a row for every point of a sweep; of one that was taken over only its best, without a score."""
    rows: list[tuple[Cell, ...]] = []
    for number, point in enumerate(sweep.points):
        is_best = number == sweep.best
        if sweep.like is not None and not is_best:
            continue
        setting = ", ".join(f"{key} {value}" for key, value in point.values.items())
        own = point.score if sweep.like is None else None
        is_at_edge = is_best and bool(sweep.at_edge)
        best = words("tuning.best") if sweep.like is None else words("tuning.like", other=sweep.like)
        remarks = [best] * is_best + [words("tuning.edge")] * is_at_edge + [words("tuning.close")] * (point in sweep.close)
        rows.append(
            (
                Cell(sweep.experiment),
                Cell(sweep.budget),
                Cell(setting),
                Cell("" if own is None else f"{own:.4f}", own),
                Cell(str(len(point.seeds)), len(point.seeds)),
                Cell(words.listed(remarks), mark="warn" if is_at_edge else ""),
            )
        )
    return rows


def _swept_otherwise(findings: Findings, words: Words) -> list[str]:
    """Return which sweeps had special settings, and which arms have settings that their sweep lacked."""
    arms = [(arm, sweeps[0]) for arm in findings.arms if (sweeps := findings.sweeps.of(arm))]
    own = {f"{sweep.experiment}, {sweep.budget}": sweep.changes for _, sweep in arms if sweep.like is None}
    by_settings: dict[str, list[str]] = {}
    for name, changes in own.items():
        by_settings.setdefault(words.listed(f"{key} {value}" for key, value in changes.items()), []).append(name)
    shown = [
        words("tuning.all_settings", count=len(names), settings=settings)
        if len(names) == len(own) > 1
        else words("tuning.settings", arm="; ".join(names), settings=settings)
        for settings, names in by_settings.items()
        if settings
    ]
    elsewhere = [arm for arm, sweep in arms if arm.variant.startswith(TUNED) and _has_more(arm, sweep)]
    shown += [words("tuning.elsewhere", arms=_named(elsewhere))] if elsewhere else []
    alike = [pair.arm for pair in findings.pairs if not pair.confounded and not pair.arm.variant.startswith(TUNED)]
    return shown + ([words("tuning.not_swept", arms=_named(alike))] if alike else [])


def _named(arms: Sequence[Arm]) -> str:
    return "; ".join(f"{label(arm)}, {arm.budget}" for arm in arms)


def _has_more(arm: Arm, sweep: SweepRecord) -> bool:
    """Whether a tuned arm has changes that its sweep lacked."""
    if is_tuned_alone(arm.variant) or not arm.is_usable:
        return False
    settings = flatten(arm.first.config)
    shared = {key: value for key, value in sweep.changes.items() if settings.get(key) == value}
    # Names end in a digest, which is of the sweep's grid too.
    return not shared or arm.variant.rsplit("-", 1)[0] != TUNED + variant_name(shared).rsplit("-", 1)[0]
