"""What the earlier study reported, next to what was measured here."""

from __future__ import annotations

from oelm.report.arms import Arm
from oelm.report.document import Block, Cell, Section, Table, Text
from oelm.report.pairs import Findings, Pair, gap_between
from oelm.report.sections.verdicts import best_text
from oelm.report.words import Words, templates
from oelm.text import fixed

# Sources in the catalog are English text: the English word for each is that text itself, which finds its key.
_SOURCE = "source."


def reported_section(findings: Findings, words: Words) -> Section | None:
    """Return reported and measured figures side by side; None where nothing reported was measured."""
    rows, has_measured = [], False
    for experiment in findings.catalog:
        if experiment.reported is None:
            continue
        figures = experiment.reported.figures
        usable = [arm for arm in findings.arms if arm.experiment == experiment.id and arm.is_usable and arm.budget != "smoke"]
        measured = findings.unswept(usable)
        has_measured |= bool(measured)
        pairs = [pair for pair in findings.pairs if pair.arm.experiment == experiment.id and pair.arm.budget != "smoke"]
        rows.append(
            (
                Cell(experiment.id),
                Cell(_reported(figures, words)),
                Cell(_reported_gap(findings, experiment.id)),
                Cell(_measured(measured) or words("reported.not_measured"), mark="" if measured else "muted"),
                Cell("; ".join(_gap(pair, words) for pair in pairs if pair.seeds)),
                Cell(source_text(experiment.reported.source, words)),
            )
        )
    if not has_measured:
        return None
    columns = tuple(words(f"reported.{name}") for name in ("id", "reported", "reported_gap", "measured", "gap", "source"))
    blocks: list[Block] = [Text(words("reported.text"))]
    blocks.append(Table("reported", words("reported.caption"), columns, tuple(rows), frozenset()))
    return Section("reported", words("reported.title"), tuple(blocks))


def source_text(source: str, words: Words) -> str:
    """Return a source of the package's catalog in the reader's language, and a user's own as it is."""
    keys = {text: key for key, text in templates("en").items() if key.startswith(_SOURCE)}
    return words(keys[source]) if source in keys else source


def _reported(figures: dict[str, float], words: Words) -> str:
    """Return the headline of reported figures; a user's own entry may have others only."""
    if "best_ppl" in figures:
        return f"{figures['best_ppl']:g}"
    if "best_accuracy" in figures:
        return f"{100 * figures['best_accuracy']:.2f}%"
    return words.listed(f"{name} {value:g}" for name, value in figures.items())


def _reported_gap(findings: Findings, name: str) -> str:
    """Return the gap that follows from the reported figures; computed, not taken over."""
    experiment = findings.catalog.get(name)
    other = findings.catalog.get(experiment.baseline).reported if experiment.baseline else None
    if experiment.reported is None or other is None:
        return ""
    ours, theirs = experiment.reported.figures, other.figures
    if "best_ppl" in ours and theirs.get("best_ppl"):
        return f"{fixed(100 * (ours['best_ppl'] / theirs['best_ppl'] - 1), 1, sign=True)}%"
    if "best_accuracy" in ours and "best_accuracy" in theirs:
        return f"{100 * (ours['best_accuracy'] - theirs['best_accuracy']):+.2f}"
    return ""


def _measured(arms: list[Arm]) -> str:
    which = {arm.key: arm.budget if arm.variant == "default" else f"{arm.budget}, {arm.shown}" for arm in arms}
    return "; ".join(f"{best_text(arm, 'val')} ({which[arm.key]}, n={len(arm.runs)})" for arm in arms)


def _gap(pair: Pair, words: Words) -> str:
    mark = f", {words('verdict.CONFOUNDED')}" if pair.confounded else ""
    return f"{gap_between(pair.arm, pair.baseline, 'val').text} ({pair.arm.budget}, n={len(pair.seeds)}{mark})"
