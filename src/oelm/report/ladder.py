"""What each ingredient is worth: arms of one data set in a row, each compared with the one before it; and across data sets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from oelm.decimals import fixed
from oelm.errors import DataError
from oelm.report.collect import Arm, Run, common_split
from oelm.report.document import Block, Cell, Section, Table, Text
from oelm.report.findings import Findings, Pair, label, method_of, split_text
from oelm.report.kinds import class_of, pair_text
from oelm.report.stats import Interval, detectable, document_log_ratio, example_difference, paired_difference, paired_log_ratio
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
    for baseline, pairs in findings.families():
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
    gap, text = compared(arm, below, split)
    common = len(arm.best.keys() & below.best.keys())
    family = f"{label(baseline)}, {baseline.budget}"
    sort = gap.value if gap is not None else None
    return Cell(family), Cell(label(below)), Cell(label(arm)), Cell(adds), Cell(text, sort), Cell(str(common), common)


def compared(arm: Arm, other: Arm, split: Split) -> tuple[Interval | None, str]:
    """Return the paired gap between two arms on a split and how it is written; without an interval for a single seed."""
    ours, theirs = arm.on(split), other.on(split)
    seeds = sorted(ours.keys() & theirs.keys())
    if arm.metric == "ppl":
        interval = paired_log_ratio(ours, theirs)
        if interval is not None:
            return interval, ratio_text(interval)
        return None, f"{fixed(100 * (ours[seeds[0]] / theirs[seeds[0]] - 1), 1, sign=True)}%" if seeds else ""
    interval = paired_difference(ours, theirs)
    if interval is not None:
        return interval, points_text(interval)
    return None, f"{100 * (ours[seeds[0]] - theirs[seeds[0]]):+.2f}" if seeds else ""


def over_documents(ours: Sequence[Run], theirs: Sequence[Run], split: Split) -> Interval | None:
    """Return the interval over documents of paired runs of language models, where all kept their losses on the same ones."""
    try:
        sides = [[run.documents(split) for run in runs] for runs in (ours, theirs)]
    except DataError:
        return None
    texts = {tuple((row.document, row.tokens) for row in rows) for side in sides for rows in side}
    if len(texts) != 1:
        return None
    tokens = [count for _, count in texts.pop()]
    mine, reference = ([[row.nats for row in rows] for rows in side] for side in sides)
    return document_log_ratio(mine, reference, tokens)


def over_examples(ours: Sequence[Run], theirs: Sequence[Run], split: Split) -> Interval | None:
    """Return the interval over examples of paired runs of a classifier, where all kept their answers to the same examples.

    On validation the answers are those of the final models.
    """
    try:
        sides = [[run.predictions(split) for run in runs] for runs in (ours, theirs)]
    except DataError:
        return None
    # Answers to other questions are not to be paired, and of a file that was cut off nobody knows which are there.
    if not ours or len({tuple((row.example, row.label) for row in rows) for side in sides for rows in side}) > 1:
        return None
    return example_difference(*([[row.label == row.predicted for row in rows] for rows in side] for side in sides))


def detectable_text(interval: Interval | None) -> str | None:
    """Return in points what a comparison could have seen; None where it has no interval, or one of no width."""
    return None if interval is None or interval.half_width == 0 else f"{100 * detectable(interval):.2f}"


def ratio_text(interval: Interval) -> str:
    """Return a ratio as a change in percent with its interval."""
    value, low, high = (fixed(100 * (end - 1), 1, sign=True) for end in (interval.value, interval.low, interval.high))
    return f"{value}% [{low}, {high}]"


def points_text(interval: Interval) -> str:
    """Return a difference of shares in points with its interval."""
    value, low, high = (100 * number for number in (interval.value, interval.low, interval.high))
    return f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"


def level_text(level: float) -> str:
    """Return a level in percent, with as many decimals as it takes not to look like certainty."""
    for decimals in range(2, 15):
        text = f"{100 * level:.{decimals}f}"
        if float(text) < 100:
            break
    return f"{text.rstrip('0').rstrip('.')}%"


def across_section(findings: Findings, words: Words) -> Section | None:
    """Return every method's gap on every data set, and language models beside classifiers."""
    fair = [pair for pair in findings.pairs if not pair.confounded]
    blocks: list[Block] = []
    for metric in ("ppl", "accuracy"):
        chosen = [pair for pair in fair if pair.arm.metric == metric]
        if len({_data(pair) for pair in chosen}) > 1:
            blocks.append(_matrix(findings, chosen, metric, words))
    if len({pair.arm.metric for pair in fair}) == 2:
        blocks.append(Text(words("across.kinds"), "note"))
    if not blocks:
        return None
    return Section("across", words("across.title"), (Text(words("across.text")), *blocks))


def _data(pair: Pair) -> str:
    manifest = pair.arm.runs[0].manifest
    assert manifest is not None
    return ", ".join([manifest.data.name, pair.arm.budget] + [pair.arm.shown] * (pair.arm.variant != "default"))


def _matrix(findings: Findings, pairs: list[Pair], metric: str, words: Words) -> Table:
    sets = sorted({_data(pair) for pair in pairs})
    cells: dict[tuple[str, str], Cell] = {}
    for pair in sorted(pairs, key=lambda pair: -len(pair.seeds)):
        gap, text = compared(pair.arm, pair.baseline, pair.split)
        text = words("across.on_test", gap=text) if pair.split == "test" and text else text
        # A control is called by its end alone, as by class: with its baseline's name it would have a row on each data set.
        row = pair_text(pair, findings.catalog, words)
        # What has the method of another arm, or of its own baseline, stands under its own name.
        is_alike = method_of(pair.arm, findings.catalog) == method_of(pair.baseline, findings.catalog)
        if (is_alike and class_of(pair) != "control") or (row, _data(pair)) in cells:
            row = f"{row}, {pair.arm.experiment}"
        cells[row, _data(pair)] = Cell(text, gap.value if gap is not None else None)
    methods = sorted({method for method, _ in cells})
    rows = tuple((Cell(method), *(cells.get((method, name), Cell("")) for name in sets)) for method in methods)
    columns = (words("across.method"), *sets)
    return Table(f"across-{metric}", words(f"across.{metric}"), columns, rows, frozenset(range(1, len(columns))))
