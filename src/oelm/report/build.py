"""From recorded runs to a report: collect, judge, and set every section in the reader's language."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from oelm.experiments.catalog import Catalog
from oelm.report.arms import Arm, ImportedStudy, collect, collect_imported
from oelm.report.document import Chart, Document, Section
from oelm.report.foreign import JudgedStudy, Question, imported_section, judge_studies
from oelm.report.pairs import Findings, find
from oelm.report.sections.baselines import baselines_section
from oelm.report.sections.classes import answer_section, classes_section, kept_section
from oelm.report.sections.costs import costs_section
from oelm.report.sections.heads import heads_section, tuning_section
from oelm.report.sections.learning import learning_section
from oelm.report.sections.reported import reported_section
from oelm.report.sections.verdicts import JudgedPair, judge_all, verdict_section
from oelm.report.words import Words
from oelm.runs.status import now_text

# By name, each where its section has rows; one table for each imported study comes on top.
TABLES = (
    "baselines",
    "classes",
    "controls",
    "costs",
    "figures",
    "heads",
    "imported",
    "kept",
    "plain",
    "reported",
    "seconds",
    "sensitivity",
    "speed",
    "tuning",
    "verdicts",
)


@dataclass(frozen=True)
class Report:
    """A report's findings and verdicts, from which a document is made in any language."""

    findings: Findings
    judged: list[JudgedPair]
    imported: list[ImportedStudy] = field(default_factory=list)
    judged_imported: list[JudgedStudy] = field(default_factory=list)

    def document(self, lang: str) -> Document:
        """Return the whole report in one language; empty sections are left out."""
        words, findings = Words(lang), self.findings
        budgets = words.listed(sorted({arm.budget for arm in findings.arms})) or "-"
        verdicts = verdict_section(findings, self.judged, words)
        others = imported_section(self.imported, self.judged_imported, words)
        sections = (
            answer_section(findings, self.judged, words),
            # With imported runs only, the report would start with the message that we have none.
            verdicts if findings.arms or others is None else None,
            others,
            kept_section(findings, self.judged, words),
            classes_section(findings, self.judged, words),
            baselines_section(findings, words),
            learning_section(findings, words),
            costs_section(findings, words),
            tuning_section(findings, words),
            heads_section(findings, words),
            reported_section(findings, words),
        )
        return Document(
            lang=lang,
            title=words("report.title"),
            subtitle=words("report.subtitle", budgets=budgets, date=now_text()[:10]),
            contents=words("report.contents"),
            footer=words("report.footer"),
            sections=_each_chart_once(section for section in sections if section is not None),
        )


def _each_chart_once(sections: Iterable[Section]) -> tuple[Section, ...]:
    """Return sections without the charts that an earlier one, such as the answer, shows."""
    seen: set[str] = set()
    found = []
    for section in sections:
        blocks = tuple(block for block in section.blocks if not (isinstance(block, Chart) and block.name in seen))
        seen |= {block.name for block in blocks if isinstance(block, Chart)}
        found.append(replace(section, blocks=blocks))
    return tuple(found)


def build_report(
    roots: Sequence[Path],
    catalog: Catalog,
    *,
    only: Collection[str] = (),
    budgets: Collection[str] = (),
    question: Question | None = None,
) -> Report:
    """Collect and judge the runs under the roots; tell of the experiments named, with their baselines, where any are.

    A verdict does not depend on what else is reported: arms of the same baselines are judged together, named or not. `question`
    is what others' runs are judged by.
    """
    wanted = _with_baselines(only, catalog)
    together = wanted | {name for name, baseline in catalog.baselines().items() if baseline in wanted}
    report = report_on(collect(roots, only=together, budgets=budgets), roots, catalog, only=only)
    # Named experiments are all that the user asked for.
    return with_imported(report, roots, question) if question is not None or not (only or budgets) else report


def with_imported(report: Report, roots: Sequence[Path], question: Question | None) -> Report:
    """Return a report with imported runs, judged if a question is given."""
    imported = collect_imported(roots)
    return replace(report, imported=imported, judged_imported=judge_studies(imported, question))


def _with_baselines(only: Collection[str], catalog: Catalog) -> set[str]:
    baseline_of = catalog.baselines()
    return set(only) | {baseline_of[name] for name in only if name in baseline_of}


def report_on(arms: Sequence[Arm], roots: Sequence[Path], catalog: Catalog, *, only: Collection[str] = ()) -> Report:
    """Judge arms, of which none that shares a baseline with one of `only` may be missing."""
    findings = find(arms, catalog, roots)
    judged = judge_all(findings)
    if only:
        wanted = _with_baselines(only, catalog)
        findings = findings.restricted(wanted)
        judged = [row for row in judged if row.pair.arm.experiment in wanted]
    return Report(findings, judged)
