"""The first page: every arm against its criterion, how sure we are, and what is missing."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from oelm.experiments.portable import this_machine
from oelm.report.arms import Arm, Mixture
from oelm.report.charts import Target
from oelm.report.document import Block, Cell, Mark, Section, Table, Text
from oelm.report.judge import Judgement, Look, Looks, Reason, ReasonCode, comparison_key, judge, judge_together
from oelm.report.pairs import (
    CLASSES,
    Findings,
    Pair,
    class_of,
    draw_of,
    label,
    over_documents,
    over_examples,
    pair_text,
    questions_of,
    split_text,
)
from oelm.report.sections.baselines import baseline_remarks, unfit_baselines
from oelm.report.words import Words
from oelm.runs.find import OWN, ArmKey
from oelm.runs.layout import EvaluatedSplit
from oelm.stats import LEVEL, POWER, Interval, PairedGap, detectable_text, interval_text, level_text, pooled_log_ratio
from oelm.text import figure_text, fixed

MARKS: dict[str, Mark] = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "warn", "CONFOUNDED": "warn", "UNFIT_BASELINE": "warn"}
_SMOKE = "smoke"
# Shown as the level of an interval, in a column.
_TOGETHER = "many_comparisons"
# The goal of the earlier study: 1.05 times the baseline's perplexity, five points of accuracy.
BOUNDS = {"ppl": 1.05, "accuracy": -0.05}


@dataclass(frozen=True)
class JudgedPair:
    """A pair with its verdict, and the two sensitivity analyses."""

    pair: Pair
    judgement: Judgement
    pooled: Interval | None
    examples: Interval | None


def decided_by(row: JudgedPair, words: Words) -> PairedGap:
    """Return the gap with the interval that decided, and with its level where that is not the usual one."""
    interval = row.judgement.interval
    if interval is None:
        return row.pair.gap
    return PairedGap(interval, levelled(interval, row.pair.arm.metric, words))


def levelled(interval: Interval, metric: str, words: Words) -> str:
    """Return an interval as text, with its level where that is not the usual one."""
    text = interval_text(interval, metric)
    return text if interval.level == LEVEL else words("verdict.at", gap=text, level=level_text(interval.level))


def judge_all(findings: Findings) -> list[JudgedPair]:
    """Judge every pair at its planned seeds, corrected for how many share its baseline and how often it was judged before."""
    unfit = unfit_baselines(findings)
    looks = _numbered(findings, unfit)
    judgements: dict[ArmKey, Judgement] = {}
    for _, family in findings.families:
        counted = [pair for pair in family if _can_be_judged(pair, unfit)]
        judges = [partial(_judge, pair, looks[pair.arm.key], unfit, len(counted)) for pair in counted]
        judgements |= {pair.arm.key: found for pair, found in zip(counted, judge_together(judges), strict=True)}
        rest = [pair for pair in family if pair.arm.key not in judgements]
        judgements |= {pair.arm.key: _judge(pair, looks[pair.arm.key], unfit, 1, 1) for pair in rest}
    return [JudgedPair(pair, judgements[pair.arm.key], _pooled(findings, pair), _examples(pair)) for pair in findings.pairs]


class _Seen(NamedTuple):
    """Which look at its question a comparison is, and which seeds of earlier looks it lacks."""

    look: int
    dropped: tuple[int, ...]


def _numbered(findings: Findings, unfit: Collection[ArmKey]) -> dict[ArmKey, _Seen]:
    """Count every comparison's look; of several new tries of one question each is a look after those before it."""
    looks, questions = _all_looks(findings.roots), questions_of(findings.arms)
    found = {}
    for pair in findings.pairs:
        key = comparison_key(*pair.arm.key)
        seen = _Seen(looks.look_number(key, pair.seeds, questions), looks.dropped(key, pair.seeds))
        found[pair.arm.key] = seen
        if _can_be_judged(pair, unfit) and not seen.dropped:
            looks = looks.seen(key, pair.seeds, date=_today(), questions=questions)
    return found


def _judge(pair: Pair, seen: _Seen, unfit: Mapping[ArmKey, Reason], comparisons: int, share: int) -> Judgement:
    experiment = pair.experiment
    found = judge(
        pair.arm.on(pair.split),
        pair.baseline.on(pair.split),
        metric=pair.arm.metric,
        criterion=experiment.criterion if experiment is not None and pair.arm.budget != _SMOKE else None,
        planned=_planned(pair),
        look=seen.look,
        comparisons=comparisons,
        share=share,
        confounded_by=pair.confounded,
        unfit=unfit.get(pair.baseline.key),
        dropped=seen.dropped,
        refused=_refused(pair),
        draw=draw_of(pair.arm),
    )
    return replace(found, reasons=(*found.reasons, *_mixed_reasons(pair)))


def _refused(pair: Pair) -> tuple[int, ...]:
    return tuple(sorted({*pair.arm.refused_seeds, *pair.baseline.refused_seeds}))


def _mixed_reasons(pair: Pair) -> list[Reason]:
    """Return what the seeds of the arm or the baseline do not share: each value with its seeds."""
    sides: tuple[tuple[ReasonCode, Arm], ...] = (("mixed_arm", pair.arm), ("mixed_baseline", pair.baseline))
    reasons = []
    for code, arm in sides:
        settings = []
        for name, by in arm.mixed.items():
            # Of a revision the first digits, and its mark where the files differed from it.
            values = {f"{value[:8]}{value[40:]}" if len(value) >= 40 else value: own for value, own in by.items()}
            shown = " / ".join(f"{value}: {', '.join(map(str, own))}" for value, own in values.items())
            settings.append(f"{name} ({shown})")
        reasons += [Reason(code, {"settings": tuple(settings)})] if settings else []
    return reasons


def mixed_text(verdict: str, pair: Pair, words: Words) -> str:
    """Return a verdict with what the seeds behind it do not share."""
    what = [words(f"mixed.{name}") for name in dict.fromkeys([*pair.arm.mixed, *pair.baseline.mixed])]
    return words("verdict.mixed", verdict=verdict, what=words.listed(what)) if what else verdict


def _all_looks(roots: Sequence[Path]) -> Looks:
    """Return the looks of all roots as one book: whichever of them it was written in, a look was a look."""
    entries: dict[str, tuple[Look, ...]] = {}
    for root in roots:
        for key, looks in Looks.read(root).entries.items():
            known = {look.seeds for look in entries.get(key, ())}
            both = (*entries.get(key, ()), *(look for look in looks if look.seeds not in known))
            entries[key] = tuple(sorted(both, key=lambda look: look.date))
    return Looks(roots[0], entries)


def record_looks(judged: list[JudgedPair], roots: Sequence[Path]) -> None:
    """Record which comparisons were given a verdict at which seeds, in the folders that hold the runs."""
    questions = questions_of(row.pair.arm for row in judged)
    for root in roots:
        seen = {
            comparison_key(*row.pair.arm.key): row.pair.seeds
            for row in judged
            if row.judgement.is_look and any(run.path.is_relative_to(root) for run in row.pair.arm.runs)
        }
        if seen:
            Looks.read(root).record(seen, date=_today(), questions=questions)


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _planned(pair: Pair) -> int:
    return pair.experiment.seeds if pair.experiment is not None else 5


def _can_be_judged(pair: Pair, unfit: Collection[ArmKey]) -> bool:
    """Whether a pair may be given a verdict, and so counts among those that are judged together."""
    has_criterion = pair.experiment is not None and pair.experiment.criterion is not None
    is_enough = len(pair.seeds) >= max(2, _planned(pair))
    is_fair = not pair.confounded and pair.baseline.key not in unfit and draw_of(pair.arm) is None
    return has_criterion and is_fair and pair.arm.budget != _SMOKE and is_enough and not _refused(pair)


def _pooled(findings: Findings, pair: Pair) -> Interval | None:
    if pair.arm.metric != "ppl":
        return None
    family = next(pairs for baseline, pairs in findings.families if baseline.key == pair.baseline.key)
    # On the split of this comparison, with those of the family that are compared on it too.
    arms = {"/".join(other.arm.key): other.arm for other in family if pair.split in ("val", other.split)}
    figures = {key: arm.on(pair.split) for key, arm in arms.items()} | {"": pair.baseline.on(pair.split)}
    return pooled_log_ratio(figures, "/".join(pair.arm.key), "")


def _examples(pair: Pair) -> Interval | None:
    """Return the interval over examples or documents, where all runs kept them: on validation the final models'."""
    if not pair.seeds:
        return None
    arms = [{run.seed: run for run in arm.runs} for arm in (pair.arm, pair.baseline)]
    ours, theirs = ([runs[seed] for seed in pair.seeds] for runs in arms)
    over = over_examples if pair.arm.metric == "accuracy" else over_documents
    return over(ours, theirs, pair.split)


def verdict_section(findings: Findings, judged: list[JudgedPair], words: Words) -> Section:
    """Return the table of verdicts, every arm's figures, and what to know about the runs."""
    warnings: list[Block] = [Text(text, "warning") for text in _remarks(findings, words)]
    figures: list[Block] = [_figures(findings, words)] if any(arm.is_usable for arm in findings.arms) else []
    if not judged:
        blocks: list[Block] = [*warnings, Text(words("verdict.nothing"), "warning"), *figures]
        return Section("verdicts", words("verdict.title"), tuple(blocks))
    table = verdict_table(findings, judged, words)
    opening = Text(words("sentence.separator").join(_headline(judged, words)))
    notes = [Text(text, "note") for text in _reasons(judged, words)]
    blocks = [opening, table, *warnings, *notes, *_sensitivity(table, words), *figures]
    return Section("verdicts", words("verdict.title"), tuple(blocks))


def _headline(judged: list[JudgedPair], words: Words) -> list[str]:
    """Say how many comparisons have which verdict, and on which split they are made."""
    told = []
    for kind in CLASSES:
        verdicts = [row.judgement.verdict for row in judged if row.judgement.is_look and class_of(row.pair) == kind]
        if verdicts:
            counts = {name.lower(): verdicts.count(name) for name in ("PASS", "FAIL", "INCONCLUSIVE")}
            told.append(words("verdict.class", kind=words(f"classes.{kind}"), **counts))
    counted = words("verdict.counts", comparisons=len(judged), classes="; ".join(told))
    lines = [counted if told else words("verdict.none", comparisons=len(judged))]
    if told and (others := sum(not row.judgement.is_look for row in judged)):
        lines.append(words("verdict.others", count=others))
    tested = sum(row.pair.split == "test" for row in judged)
    if 0 < tested < len(judged):
        return [*lines, words("verdict.on_both", tested=tested, others=len(judged) - tested)]
    return [*lines, words("verdict.on_test") if tested else words("verdict.on_validation")]


_COLUMNS = ("arm", "budget", "seeds", "best", "gap", "verdict", "kind", "sensitivity", "method", "on", "interval_level", "data")
_ON_PAGE = ("method", "data", "gap", "verdict", "interval_level", "best", "seeds", "budget", "on", "arm")
# Where all rows agree in these, the page says so elsewhere: in its subtitle, its first paragraph and the caption.
_MAY_AGREE = {"budget", "on", "interval_level"}


def verdict_table(findings: Findings, judged: list[JudgedPair], words: Words) -> Table:
    """Return every comparison with its verdict; a page has the sensitivity in a separate table."""
    rows = tuple(_row(findings, row, words) for row in judged)
    places = {name: _COLUMNS.index(name) for name in _ON_PAGE}
    differ = {name for name, place in places.items() if len({row[place].text for row in rows}) > 1}
    on_page = tuple(place for name, place in places.items() if name in differ or name not in _MAY_AGREE)
    columns = tuple(words(f"verdict.{name}") for name in _COLUMNS)
    return Table("verdicts", words("verdict.caption"), columns, rows, frozenset({2, 3, 4, 7, 10}), on_page)


def _sensitivity(table: Table, words: Words) -> list[Table]:
    """Return the sensitivity analyses of a table of verdicts, next to the gaps."""
    places = [_COLUMNS.index(name) for name in ("method", "data", "gap", "sensitivity", "arm")]
    rows = tuple(tuple(row[place] for place in places) for row in table.rows if row[_COLUMNS.index("sensitivity")].text)
    columns = tuple(table.columns[place] for place in places)
    return [Table("sensitivity", words("verdict.sensitivities"), columns, rows, frozenset({2, 3}))] if rows else []


def _row(findings: Findings, row: JudgedPair, words: Words) -> tuple[Cell, ...]:
    pair, judgement, kind = row.pair, row.judgement, class_of(row.pair)
    interval, metric = judgement.interval, pair.arm.metric
    gap = pair.gap if interval is None else PairedGap(interval, interval_text(interval, metric))
    other = row.pooled if pair.arm.metric == "ppl" else row.examples
    other_text = "" if other is None else interval_text(other, metric)
    if row.pooled is not None and row.examples is not None:
        other_text = words("verdict.documents", pooled=other_text, documents=interval_text(row.examples, metric))
    is_smoke = pair.arm.budget == _SMOKE
    level = None if interval is None else interval.level
    verdict = words("verdict.SMOKE") if is_smoke else mixed_text(words(f"verdict.{judgement.verdict}"), pair, words)
    return (
        Cell(f"{label(pair.arm)} / {label(pair.baseline)}"),
        Cell(pair.arm.budget),
        Cell(f"{judgement.num_seeds}/{judgement.planned}", judgement.num_seeds),
        Cell(best_text(pair.arm, pair.split), pair.arm.mean(pair.split)),
        Cell(gap.text, gap.value),
        Cell(verdict, judgement.verdict, "muted" if is_smoke else MARKS.get(judgement.verdict, "")),
        Cell(words(f"classes.{kind}"), CLASSES.index(kind)),
        Cell(other_text, other.value if other is not None else None),
        Cell(pair_text(pair, findings.catalog, words)),
        Cell(split_text(pair.split, words)),
        Cell("" if level is None else level_text(level), level),
        Cell(pair.arm.data),
    )


def best_text(arm: Arm, split: EvaluatedSplit) -> str:
    """Return an arm's headline on a split: the mean over seeds of PPL or accuracy."""
    return figure_text(arm.metric, arm.mean(split))


def target_of(metric: str, bound: float, words: Words) -> Target:
    """Return the line in a picture that arms of a metric are compared with, with its words."""
    told = told_bound(metric, bound)
    name, whole = words(f"forest.target.{metric}", bound=told), words(f"forest.bound.{metric}", bound=told)
    return Target(bound, name, whole, words("forest.none"), nothing=1.0 if metric == "ppl" else 0.0)


def told_bound(metric: str, bound: float) -> float:
    """Return a bound as people read it: a ratio, or points that may be lost."""
    return bound if metric == "ppl" else -100 * bound


def bound_of(pair: Pair) -> float:
    """Return what an arm's criterion allows at most; the study's own target where the catalog names none."""
    criterion = pair.experiment.criterion if pair.experiment is not None else None
    return BOUNDS[pair.arm.metric] if criterion is None else criterion.bound


def _figures(findings: Findings, words: Words) -> Table:
    """Return every arm's figures by seed, without points of sweeps; only measured figures are in it."""
    usable = [arm for arm in findings.arms if arm.is_usable]
    arms = findings.unswept(usable) or usable
    shown = {"arm": [Cell(label(arm)) for arm in arms], "budget": [Cell(arm.budget) for arm in arms]}
    splits: tuple[tuple[EvaluatedSplit, str, str, str], ...] = (
        ("val", "best", "majority", "seeds"),
        ("test", "test", "test_majority", "test_seeds"),
    )
    for split, *names in splits:
        found = zip(*(_on_split(arm, split) for arm in arms), strict=True)
        # An empty column, such as that of a test split, promises too much.
        shown |= {name: list(cells) for name, cells in zip(names, found, strict=True) if any(cell.text for cell in cells)}
    columns = tuple(words(f"figures.{name}") for name in shown)
    numeric = frozenset(number for number, cells in enumerate(shown.values()) if any(cell.sort is not None for cell in cells))
    return Table("figures", words("figures.caption"), columns, tuple(zip(*shown.values(), strict=True)), numeric)


def _on_split(arm: Arm, split: EvaluatedSplit) -> tuple[Cell, Cell, Cell]:
    """Return an arm's mean on a split, what naming the largest class always comes to, and each seed's figure."""
    if not (found := arm.on(split)):
        return Cell(""), Cell(""), Cell("")
    share = arm.majority(split)
    seeds = ", ".join(f"{seed}: {figure_text(arm.metric, value)}" for seed, value in sorted(found.items()))
    return (
        Cell(best_text(arm, split), arm.mean(split)),
        Cell("" if share is None else f"{100 * share:.2f}%", share),
        Cell(seeds),
    )


def _remarks(findings: Findings, words: Words) -> list[str]:
    """Return what is unfinished, damaged or mixed, arm by arm."""
    machine = this_machine()
    remarks = [_mixed(arm, arm.refused, words) for arm in findings.arms if arm.refused is not None]
    remarks += [_alone(arm, key, findings, words) for arm, key in findings.without_baseline()]
    remarks += [remark for pair in findings.pairs for remark in _some_tested(pair, words)]
    remarks += baseline_remarks(findings, words)
    remarks += [words("remark.damaged", why=machine.stripped(why)) for why in findings.sweeps.damages]
    for arm in findings.arms:
        for state in sorted({run.state for run in arm.unfinished}):
            runs = [run for run in arm.unfinished if run.state == state]
            seeds = words.listed(sorted(run.seed for run in runs))
            told = [words("remark.unfinished", arm="/".join(arm.key), state=words(f"state.{state}"), seeds=seeds)]
            # Messages stored in a record are quoted in their own language.
            reasons = dict.fromkeys(run.problem for run in runs if run.problem)
            reasons = reasons or dict.fromkeys([run.message for run in runs if run.message][:1])
            told += [words("remark.recorded", why=machine.stripped(why)) for why in reasons]
            remarks.append(words("sentence.separator").join(told))
    for key, chosen in sorted(findings.swept.items()):
        remarks.append(words("remark.swept", arm="/".join(key), seeds=words.listed(chosen)))
    return remarks


def _some_tested(pair: Pair, words: Words) -> list[str]:
    """Say that a pair is compared on validation though some of its runs have figures on test."""
    found = len(pair.arm.on("test")) + len(pair.baseline.on("test"))
    if pair.split == "test" or not found:
        return []
    names = {"arm": "/".join(pair.arm.key), "baseline": label(pair.baseline)}
    return [words("remark.some_tested", **names, found=found, runs=len(pair.arm.runs) + len(pair.baseline.runs))]


def _alone(arm: Arm, baseline: ArmKey, findings: Findings, words: Words) -> str:
    """Return why an arm is compared with nothing; `baseline` is where its baseline would be."""
    name = "/".join(arm.key)
    # Of `oelm train`, an arm that exists is the baseline of the same config.
    if arm.experiment in OWN and baseline not in {each.key for each in findings.arms}:
        return words("remark.untrained", arm=name)
    return words("remark.alone", arm=name, baseline="/".join(baseline))


def _mixed(arm: Arm, mixture: Mixture, words: Words) -> str:
    values = {
        name: _without_home(words.listed(value) if isinstance(value, tuple) else str(value))
        for name, value in mixture.values.items()
    }
    return words("remark.mixed", arm="/".join(arm.key), why=words(f"mixture.{mixture.code}", **values))


def _reasons(judged: list[JudgedPair], words: Words) -> list[str]:
    rows = [row for row in judged if row.pair.arm.budget != _SMOKE]
    # Arms that have the same to say share a note.
    arms: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        reasons = [words("reason.on_test")] if row.pair.split == "test" else []
        is_ratio = row.pair.arm.metric == "ppl"
        own = [reason for reason in row.judgement.reasons if reason.code != _TOGETHER]
        reasons += [reason_text(reason, words, is_ratio=is_ratio) for reason in own]
        reasons += [] if is_ratio else power_text(row.judgement.interval, row.examples, words)
        said = words("sentence.separator").join(reasons)
        arms.setdefault((said, row.pair.arm.budget), []).append(label(row.pair.arm))
    return [
        words("verdict.note", arm=words.listed(names), budget=budget, reasons=said) for (said, budget), names in arms.items()
    ]


def power_text(over_seeds: Interval | None, over_examples: Interval | None, words: Words) -> list[str]:
    """Say which difference of accuracies a comparison would detect, over seeds and over examples."""
    found = {"seeds": detectable_text(over_seeds), "examples": detectable_text(over_examples)}
    told = [words(f"power.{name}", points=points) for name, points in found.items() if points is not None]
    return [words("power.text", differences=words.listed(told), power=f"{100 * POWER:g}%")] if told else []


def reason_text(reason: Reason, words: Words, *, is_ratio: bool) -> str:
    """Put a reason that is an arm's own into words; bounds and ends of intervals as people read them."""
    values: dict[str, Any] = {}
    for name, value in reason.values.items():
        if isinstance(value, tuple):
            values[name] = _without_home(words.listed(value)) or words("list.none")
        elif name in ("bound", "low", "high", "value"):
            values[name] = f"{fixed(value, 3)}x" if is_ratio else f"{100 * value:+.2f}"
        elif name == "ratio":
            values[name] = fixed(value, 3)
        elif name == "level":
            values[name] = level_text(value)
        else:
            values[name] = value
    return words(f"reason.{reason.code}", **values)


def _without_home(text: str) -> str:
    """Return paths and settings without this machine's home and working folder; a host's name may be a setting's value."""
    return replace(this_machine(), hosts=()).stripped(text)
