"""Why it happens: what the heads of trained models do, layer by layer; and whether arms were tuned alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oelm.config import flatten
from oelm.experiments.plan import CLOSE, TUNED, is_tuned_alone, variant_name
from oelm.report.arms import Arm
from oelm.report.document import Block, Cell, Section, Table, Text
from oelm.report.pairs import Findings, label
from oelm.report.words import Words

if TYPE_CHECKING:
    from oelm.experiments.sweep import SweepRecord

MEASURES = ("entropy", "logit_std", "mean_distance", "effective_rank", "induction")


def heads_section(findings: Findings, words: Words) -> Section | None:
    """Return what heads do in every arm, layer by layer: means over the heads of a layer and over seeds."""
    arms = {arm.key: arm for arms in findings.by_weight() for arm in arms}
    layers = sorted({layer for arm in arms.values() for run in arm.runs for means in run.heads.values() for layer in means})
    rows = []
    for arm in arms.values():
        for measure in MEASURES:
            seen = [run.heads[measure] for run in arm.runs if measure in run.heads]
            found = ([means[layer] for means in seen if layer in means] for layer in layers)
            cells = (Cell(f"{(mean := statistics.fmean(each)):.2f}", mean) if each else Cell("") for each in found)
            if seen:
                named = (Cell(label(arm)), Cell(arm.budget), Cell(str(len(seen)), len(seen)), Cell(words(f"why.{measure}")))
                rows.append((*named, *cells))
    if not rows:
        return None
    columns = (
        *(words(f"why.{name}") for name in ("arm", "budget", "seeds", "measure")),
        *(f"{words('why.layer')} {layer}" for layer in layers),
    )
    table = Table("heads", words("why.heads"), columns, tuple(rows), frozenset({2, *range(4, len(columns))}))
    return Section("why", words("why.title"), (Text(words("why.text")), table))


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
    told = [(settings, "; ".join(names)) for settings, names in by_settings.items() if settings]
    shown = [words("tuning.settings", arm=names, settings=settings) for settings, names in told]
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
