"""What each ingredient is worth: arms of one data set in a row, each compared with the one before it;"""

from __future__ import annotations

from itertools import pairwise

from oelm.report.collect import Arm, common_split
from oelm.report.document import Cell, Section, Table, Text
from oelm.report.findings import Findings, gap_between, label, method_of, split_text
from oelm.report.words import Words
from oelm.runs.layout import Split

# From nothing learnt and nothing known to everything learnt: what Q and K of each method have. Frames across all heads
# (oelm_global) are no rung: they have what oelm_freeze has and more, but nothing above has that too.
RUNGS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "oelm_random": ("random",),
    "gaussian_matched": ("random", "scale"),
    "oelm_freeze": ("random", "scale", "rows"),
    "oelm_freeze_pretrained": ("scale", "rows", "space"),
    "rotated": ("rows", "space", "size"),
    "polar": ("rows", "space", "size", "frame"),
    "spectral_flat": ("rows", "space", "size", "pairs"),
    "pretrained_freeze": ("weights",),
    "baseline": ("learning",),
}


def ladder_section(findings: Findings, words: Words) -> Section | None:
    """Return, for every family of at least three arms, what each rung changes against the one below."""
    rows: list[tuple[Cell, ...]] = []
    for baseline, pairs in findings.families:
        fair = [pair.arm for pair in pairs if not pair.confounded]
        # Of several arms with one method, the one of most seeds; the baseline is the top whatever else learns.
        arms = {method_of(arm, findings.catalog): arm for arm in sorted(reversed(fair), key=lambda arm: len(arm.runs))}
        arms["baseline"] = baseline
        climbing = [(method, arms[method]) for method in RUNGS if method in arms]
        if len(climbing) < 3:
            continue
        # One split for the whole ladder: its steps add up.
        split = common_split(*(arm for _, arm in climbing))
        for (lower, below), (upper, arm) in pairwise(climbing):
            adds = added(lower, upper, words)
            rows.append((*_step(baseline, below, arm, adds, split), Cell(split_text(split, words))))
    if not rows:
        return None
    columns = tuple(words(f"ladder.{name}") for name in ("family", "from", "to", "adds", "gap", "seeds", "on"))
    table = Table("ladder", words("ladder.caption"), columns, tuple(rows), frozenset({4, 5}))
    return Section("ladder", words("ladder.title"), (Text(words("ladder.text")), table))


def added(lower: str, upper: str, words: Words) -> str:
    """Return what the upper of two methods of the ladder has that the lower has not, whatever lies between them."""
    return words.listed(words(f"rung.{ingredient}") for ingredient in RUNGS[upper] if ingredient not in RUNGS[lower])


def _step(baseline: Arm, below: Arm, arm: Arm, adds: str, split: Split) -> tuple[Cell, ...]:
    gap = gap_between(arm, below, split)
    common = len(arm.best.keys() & below.best.keys())
    family = f"{label(baseline)}, {baseline.budget}"
    return Cell(family), Cell(label(below)), Cell(label(arm)), Cell(adds), Cell(gap.text, gap.value), Cell(str(common), common)
