"""What is kept of attention's worth, and the classes of frozen attention, never mixed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from oelm.experiments.plan import is_tuned_alone
from oelm.report.arms import Arm, common_split
from oelm.report.charts import Target, forest_by_set
from oelm.report.document import Block, Cell, Chart, Mark, Section, Table, Text
from oelm.report.pairs import (
    CLASSES,
    Findings,
    Pair,
    change_later,
    class_of,
    gap_between,
    has_short_conv,
    is_uniform,
    label,
    learning_in_qk,
    on_architecture,
    pair_text,
    plain_words,
)
from oelm.report.sections.baselines import LEAST_WORTH, floors, worth_of
from oelm.report.sections.verdicts import BOUNDS, JudgedPair, bound_of, decided_by, target_of, told_bound
from oelm.report.words import Words
from oelm.runs.find import ArmKey
from oelm.stats import Interval, interval_text, share_kept

_MARKS: dict[str, Mark] = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "warn", "UNFIT_BASELINE": "warn"}


class Line(NamedTuple):
    """A row: a method at one size. `place` is its class's; the counts are of what learns in Q and K; `called`: plain words."""

    place: int
    name: str
    learns: int
    whole: int
    called: str


# Of every line, its comparisons by data set.
Found = dict[Line, dict[str, JudgedPair]]


def classes_section(findings: Findings, judged: Sequence[JudgedPair], words: Words) -> Section | None:
    """Return what the classes are, and frozen arms against controls and against baselines of another architecture."""
    rows = results(judged)
    if not any(class_of(row.pair) != "control" for row in rows):
        return None
    found = lines_of(findings, [row for row in rows if row.pair.arm.metric == "ppl"], words)
    blocks: list[Block] = [Text(words("classes.text")), *gap_charts(findings, judged, words)]
    blocks += [*_beside_controls(found, words), *_beside_plain(found, words)]
    return Section("classes", words("classes.title"), tuple(blocks))


def results(judged: Sequence[JudgedPair]) -> list[JudgedPair]:
    """Return the comparisons that count: no smoke tests, nothing confounded."""
    return [row for row in judged if row.pair.arm.budget != "smoke" and not row.pair.confounded]


def lines_of(findings: Findings, rows: Sequence[JudgedPair], words: Words) -> Found:
    """Return the comparisons of each class, method and size, in the classes' order."""
    names = _names([row.pair for row in rows])
    found: Found = {}
    for row in rows:
        arm, baseline = row.pair.arm, row.pair.baseline
        counts = (learning_in_qk(arm) or 0, learning_in_qk(baseline) or 0)
        text, called = (told(row.pair, findings.catalog, words) for told in (pair_text, plain_words))
        line = found.setdefault(Line(CLASSES.index(class_of(row.pair)), text, *counts, called), {})
        name = names[row.pair.arm.key]
        # Two arms of one method on one data set: distinguished by their own names, so that neither replaces the other.
        line[f"{name} ({label(arm)})" if name in line else name] = row
    return {line: found[line] for line in sorted(found)}


def sets_of(found: Found) -> list[str]:
    """Return the columns in the order of their baselines, whatever the first row has."""
    places: dict[str, ArmKey] = {}
    for by_set in found.values():
        for name, row in by_set.items():
            places[name] = min(places.get(name, row.pair.baseline.key), row.pair.baseline.key)
    return sorted(places, key=places.__getitem__)


def title_of(line: Line, found: Found, words: Words, more: str = "") -> str:
    """Return a line's name with its class, with its size where the method has several, and with more in the brackets."""
    return f"{line.name}{_size(line, found)} ({words(f'classes.{CLASSES[line.place]}')}{more})"


def _size(line: Line, found: Found) -> str:
    sizes = {other.whole for other in found if other[:2] == line[:2]}
    return f", {line.learns:,}" if len(sizes) > 1 else ""


def _plain_title(line: Line, found: Found, words: Words, more: str = "") -> str:
    """Return a line's name for a sentence: plain words, if there are any, then the name in brackets."""
    if not line.called:
        return title_of(line, found, words, more)
    return f"{words.listed(_clauses(line))} ({line.name}{_size(line, found)}{more})"


def _clauses(line: Line) -> list[str]:
    return re.split("; |\uff1b", line.called)


def _labels(found: Found, words: Words) -> dict[str, tuple[str, ...]]:
    """Return, by their titles, the lines that a picture's labels show: plain words, then the name."""
    return {
        title_of(line, found, words): (*_clauses(line), f"{line.name}{_size(line, found)}") for line in found if line.called
    }


def gap_charts(findings: Findings, judged: Sequence[JudgedPair], words: Words) -> list[Chart]:
    """Return the gaps by method and data set: a picture for each bound that arms are compared with."""
    charts = []
    for metric, bound in sorted({(row.pair.arm.metric, bound_of(row.pair)) for row in results(judged)}, reverse=True):
        rows = [row for row in results(judged) if (row.pair.arm.metric, bound_of(row.pair)) == (metric, bound)]
        found = lines_of(findings, rows, words)
        points = [_point(title_of(line, found, words), name, row, words) for line in found for name, row in found[line].items()]
        drawn = [point for point in points if point is not None]
        if drawn:
            target, title = target_of(metric, bound, words), words(f"forest.{metric}")
            spec = forest_by_set(drawn, sets_of(found), target=target, title=title, labels=_labels(found, words))
            alt = words("forest.alt", arms=words.listed(dict.fromkeys(point["name"] for point in drawn)))
            name = "classes" if metric == "ppl" else "accuracies"
            name = name if bound == BOUNDS[metric] else f"{name}-{told_bound(metric, bound):g}"
            charts.append(Chart(name, words(f"forest.caption.{metric}", bound=told_bound(metric, bound)), spec, alt))
    return charts


def _point(title: str, name: str, row: JudgedPair, words: Words) -> dict[str, Any] | None:
    gap = decided_by(row, words)
    if (interval := gap.interval) is None:
        return None
    place = {"name": title, "arm": name, "text": gap.text, "verdict": words(f"verdict.{row.judgement.verdict}")}
    return place | {"value": interval.value, "low": interval.low, "high": interval.high}


def _beside_controls(found: Found, words: Words) -> list[Block]:
    """Return arms of which a part learns against the controls of as few parameters: what the frames or slices are worth."""
    controls = {line: by_set for line, by_set in found.items() if CLASSES[line.place] == "control"}
    sets, rows = sets_of(controls), []
    for line, by_set in found.items():
        if CLASSES[line.place] not in ("little", "partial", "much"):
            continue
        for control, theirs in controls.items():
            pairs = [(by_set.get(name), theirs.get(name)) for name in sets]
            cells = [
                _against(ours.pair.arm, other.pair.arm, words) if ours and other and _share_baseline(ours, other) else Cell("")
                for ours, other in pairs
            ]
            if _is_beside(control, line) and any(cell.text for cell in cells):
                names = (Cell(line.name), Cell(f"{line.learns:,}", line.learns))
                rows.append((*names, Cell(control.name), Cell(f"{control.learns:,}", control.learns), *cells))
    blocks: list[Block] = []
    if rows:
        columns = tuple(words(f"classes.{name}") for name in ("method", "learns", "control", "learns"))
        numeric = frozenset({1, 3, *range(4, 4 + len(sets))})
        blocks.append(Table("controls", words("classes.controls"), (*columns, *sets), tuple(rows), numeric))
    if alone := [f"{title_of(line, found, words)}: {words.listed(sets)}" for line, sets in _alone(found, controls).items()]:
        blocks.append(Text(words("classes.alone", arms="; ".join(alone)), "note"))
    return blocks


def _beside_plain(found: Found, words: Words) -> list[Block]:
    """Return arms with a short convolution, and their baselines, against the baselines without one."""
    judged = [(line, name, row.pair) for line, by_set in found.items() for name, row in by_set.items()]
    plain = {name: pair.baseline for _, name, pair in judged if not has_short_conv(pair.baseline)}
    behind = [(line, name, pair) for line, name, pair in judged if has_short_conv(pair.baseline) and name in plain]
    told = [("baseline", name, plain[name]) for _, name, _ in behind]
    told += [(on_architecture(pair.baseline, "baseline", words), name, pair.baseline) for _, name, pair in behind]
    told += [(line.name, name, pair.arm) for line, name, pair in behind]
    # Those of one name and size make a row, by data set.
    arms: dict[tuple[str, int], dict[str, Arm]] = {}
    for title, name, arm in told:
        arms.setdefault((title, arm.first.audit.trainable), {})[name] = arm
    sets = [name for name in sets_of(found) if any(name in by_set for by_set in arms.values())]
    rows = []
    for (title, trainable), by_set in arms.items():
        cells = (_against(by_set.get(name), plain[name], words) for name in sets)
        rows.append((Cell(title), Cell(f"{trainable:,}", trainable), *cells))
    columns = (words("classes.method"), words("classes.trainable"), *sets)
    table = Table("plain", words("classes.plain"), columns, tuple(rows), frozenset(range(1, len(columns))))
    return [table] if rows else []


def _is_beside(control: Line, line: Line) -> bool:
    """Whether a control has as many learning parameters as an arm, or fewer, but not so few that beating it shows nothing."""
    return control.whole == line.whole and line.learns / 2 <= control.learns <= line.learns


def _alone(found: Found, controls: Found) -> dict[Line, list[str]]:
    """Return the arms on which a little learns, with the data sets that have no control of as few parameters."""
    alone: dict[Line, list[str]] = {}
    for line, by_set in found.items():
        fair = [theirs for control, theirs in controls.items() if _is_beside(control, line)]
        missing = [name for name, row in by_set.items() if not any(_share_baseline(row, theirs.get(name)) for theirs in fair)]
        if CLASSES[line.place] == "little" and missing:
            alone[line] = missing
    return alone


def _share_baseline(ours: JudgedPair, theirs: JudgedPair | None) -> bool:
    return theirs is not None and ours.pair.baseline.key == theirs.pair.baseline.key


def _against(ours: Arm | None, theirs: Arm, words: Words) -> Cell:
    """Return one arm against another; nothing against itself, or where no seed is common to both."""
    if ours is None or ours is theirs:
        return Cell("")
    split = common_split(ours, theirs)
    gap = gap_between(ours, theirs, split)
    told = words("across.on_test", gap=gap.text) if split == "test" and gap.text else gap.text
    return Cell(told, gap.value)


def matrix(found: Found, words: Words) -> Table:
    """Return every method's gap and verdict on every data set, and what learns in its Q and K."""
    sets = sets_of(found)
    body = tuple(_row(line, by_set, sets, words) for line, by_set in found.items())
    columns = (*(words(f"classes.{name}") for name in ("class", "method", "learns", "share")), *sets)
    gaps = range(4, len(columns))
    # The method, its class and every gap before what learns, which explains them.
    return Table("classes", words("classes.caption"), columns, body, frozenset({2, 3, *gaps}), (1, 0, *gaps, 2, 3))


def _names(pairs: Sequence[Pair]) -> dict[ArmKey, str]:
    """Return the column of each arm: its data set, and what distinguishes it from others on the same data set."""
    has_budgets = len({pair.arm.budget for pair in pairs}) > 1
    plain: dict[tuple[str, str, bool], set[str]] = {}
    for pair in pairs:
        if _is_plain(pair.arm):
            plain.setdefault(_family(pair), set()).add(pair.arm.variant)
    names: dict[ArmKey, str] = {}
    for pair in pairs:
        arm = pair.arm
        # Tuned and untuned arms have different baselines: in one column they would look alike.
        is_alone = _is_plain(arm) and len(plain[_family(pair)]) == 1
        # With several sweeps on one data set, digests distinguish them.
        told = arm.variant if _is_plain(arm) else arm.shown
        more = [arm.budget] * has_budgets + [told] * (not is_alone)
        names[arm.key] = f"{pair.arm.data} ({', '.join(more)})" if more else pair.arm.data
    return names


def _family(pair: Pair) -> tuple[str, str, bool]:
    """Return what arms must share to be in one row or column: each architecture has its own sweep."""
    return pair.arm.data, pair.arm.budget, has_short_conv(pair.arm)


def _is_plain(arm: Arm) -> bool:
    """Whether an arm's variant names no settings."""
    return arm.variant == "default" or is_tuned_alone(arm.variant)


def _row(line: Line, by_set: Mapping[str, JudgedPair], sets: Sequence[str], words: Words) -> tuple[Cell, ...]:
    arm, kind = next(iter(by_set.values())).pair.arm, CLASSES[line.place]
    is_known = learning_in_qk(arm) is not None
    # What learns at the start, and what becomes of it later.
    first, last = line.learns, line.learns + change_later(arm)
    learns = words("counts.later", first=first, last=last) if last != first else f"{first:,}"
    share: float | None = None
    told = ""
    if is_known and line.whole:
        share, later = first / line.whole, last / line.whole
        told = words("shares.later", first=100 * share, last=100 * later) if later != share else f"{100 * share:.1f}%"
    return (
        Cell(words(f"classes.{kind}"), line.place),
        Cell(line.name),
        Cell(learns if is_known else "", first),
        Cell(told, share),
        *(_gap(by_set.get(each), words) for each in sets),
    )


def _gap(row: JudgedPair | None, words: Words) -> Cell:
    if row is None:
        return Cell("")
    gap = decided_by(row, words)
    text = words("across.on_test", gap=gap.text) if row.pair.split == "test" else gap.text
    mark = _MARKS.get(row.judgement.verdict, "")
    return Cell(f"{text} {words(f'verdict.{row.judgement.verdict}')}" if mark else text, gap.value, mark)


# So many names fit a sentence.
_MOST_NAMED = 4


class _Kept(NamedTuple):
    """The share of attention's worth that an arm keeps, and that worth."""

    share: Interval | None
    worth: Interval | None

    @property
    def is_worth(self) -> bool:
        return self.worth is not None and self.worth.low >= LEAST_WORTH


def answer_section(findings: Findings, judged: Sequence[JudgedPair], words: Words) -> Section | None:
    """Return the answer in a sentence, as a picture, and as a matrix of methods by data sets."""
    found = lines_of(findings, results(judged), words)
    if not found:
        return None
    _, kept = shares = _shares(findings, judged, words)
    # A share of very little is meaningless.
    is_telling = any(each.share is not None and each.is_worth for each in kept.values())
    pictures = _picture(*shares, words) if is_telling else gap_charts(findings, judged, words)
    return Section("answer", words("answer.title"), (Text(_sentence(found, words)), *pictures, matrix(found, words)))


def _sentence(found: Found, words: Words) -> str:
    """Return which methods meet the bound or, if none was judged yet, which is nearest to its baseline."""
    frozen = {
        line: rows
        for line, rows in found.items()
        if CLASSES[line.place] != "control" and not any(is_uniform(row.pair.arm) for row in rows.values())
    }
    groups: dict[str, list[str]] = {"passed": [], "failed": [], "open": []}
    for line, rows in frozen.items():
        looks = {name: row for name, row in rows.items() if row.judgement.is_look}
        verdicts = {row.judgement.verdict for row in looks.values()}
        if verdicts:
            name = "failed" if "FAIL" in verdicts else "passed" if verdicts == {"PASS"} else "open"
            worst = max(looks, key=lambda name: _at_worst(looks[name]))
            at = {"gap": decided_by(looks[worst], words).text, "set": worst}
            more = words("answer.worst", **at) if len(looks) > 1 else words("answer.at", **at)
            groups[name].append(_plain_title(line, found, words, more))
    parts = [words(f"answer.{name}", arms=_named(titles, words)) for name, titles in groups.items() if titles]
    if parts:
        return words("answer.judged", parts="; ".join(parts))
    fit = [(line, name, row) for line, rows in frozen.items() for name, row in rows.items()]
    fit = [each for each in fit if each[2].judgement.verdict != "UNFIT_BASELINE"]
    if frozen and not fit:
        return words("answer.unfit")
    measured = [each for each in fit if each[2].pair.gap.interval is not None]
    if not measured:
        return words("verdict.none", comparisons=sum(map(len, found.values())))
    line, name, row = min(measured, key=lambda each: _at_worst(each[2]))
    return words("answer.early", arm=_plain_title(line, found, words), gap=row.pair.gap.text, set=name)


def _at_worst(row: JudgedPair) -> float:
    """Return the worst that the interval allows, so that few seeds do not look good by luck."""
    interval = row.pair.gap.interval
    assert interval is not None
    return interval.high if row.pair.arm.metric == "ppl" else -interval.low


def _named(titles: Sequence[str], words: Words) -> str:
    listed = words.listed(titles[:_MOST_NAMED])
    left_out = len(titles[_MOST_NAMED:])
    return words("answer.more", arms=listed, count=left_out) if left_out else listed


def kept_section(findings: Findings, judged: Sequence[JudgedPair], words: Words) -> Section | None:
    """Return the share of attention's worth that every arm keeps, on every data set where that worth was measured."""
    found, kept = _shares(findings, judged, words)
    if not any(each.share for each in kept.values()):
        return None
    blocks: tuple[Block, ...] = (Text(words("kept.text")), *_picture(found, kept, words), _table(found, kept, words))
    return Section("kept", words("kept.title"), blocks)


def _shares(findings: Findings, judged: Sequence[JudgedPair], words: Words) -> tuple[Found, dict[ArmKey, _Kept]]:
    by_baseline = floors(findings)
    rows = [row for row in judged if row.pair.baseline.key in by_baseline and not is_uniform(row.pair.arm)]
    kept = {}
    for pair in (row.pair for row in rows):
        floor, ours, theirs = by_baseline[pair.baseline.key], pair.arm.on(pair.split), pair.baseline.on(pair.split)
        kept[pair.arm.key] = _Kept(share_kept(ours, theirs, floor.on(pair.split)), worth_of(pair, floor))
    return lines_of(findings, rows, words), kept


def _picture(found: Found, kept: Mapping[ArmKey, _Kept], words: Words) -> list[Chart]:
    points = []
    for line, by_set in found.items():
        for name, row in by_set.items():
            share, worth = kept[row.pair.arm.key]
            if share is None or worth is None:
                continue
            is_worth = kept[row.pair.arm.key].is_worth
            place = {"name": title_of(line, found, words), "arm": name, "is_worth": is_worth}
            told = {"text": _share_text(share), "verdict": words("kept.worth", worth=interval_text(worth, "ppl"))}
            points.append({**place, **told, "value": share.value, "low": share.low, "high": share.high})
    if not points:
        return []
    target = Target(1.0, words("kept.all"), words("kept.all"), words("kept.none"), nothing=0.0)
    axis, labels = words("kept.axis"), _labels(found, words)
    spec = forest_by_set(points, sets_of(found), target=target, title=axis, labels=labels, faint="is_worth")
    alt = words("forest.alt", arms=words.listed(dict.fromkeys(point["name"] for point in points)))
    return [Chart("kept", words("kept.caption", least=100 * (LEAST_WORTH - 1)), spec, alt)]


def _table(found: Found, kept: Mapping[ArmKey, _Kept], words: Words) -> Table:
    sets, body = sets_of(found), []
    for line, by_set in found.items():
        there = [kept[by_set[name].pair.arm.key] if name in by_set else None for name in sets]
        body.append((Cell(title_of(line, found, words)), *(cell for each in there for cell in _kept_cells(each, words))))
    columns = (words("kept.method"), *(text for name in sets for text in (name, words("kept.worth_on", set=name))))
    return Table("kept", words("kept.table"), columns, tuple(body), frozenset(range(1, len(columns))))


def _kept_cells(kept: _Kept | None, words: Words) -> tuple[Cell, Cell]:
    """Return the share that an arm keeps and the worth of attention, both empty where the arm is not there."""
    if kept is None:
        return Cell(""), Cell("")
    worth = Cell("") if kept.worth is None else Cell(interval_text(kept.worth, "ppl"), kept.worth.value)
    if kept.share is None:
        return Cell(words("kept.undefined"), None, "muted"), worth
    return Cell(_share_text(kept.share), kept.share.value, "" if kept.is_worth else "muted"), worth


def _share_text(share: Interval) -> str:
    return f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}]"
