"""The answer first: which methods meet the bound, and how much of attention's worth each keeps (0 is none, 1 is all)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from oelm.report.baselines import LEAST_WORTH, floors, worth_of
from oelm.report.classes import Found, gap_charts, lines_of, matrix, results, sets_of, title_of
from oelm.report.collect import ArmKey
from oelm.report.document import Block, Cell, Chart, Section, Table, Text
from oelm.report.findings import Findings, is_uniform
from oelm.report.kinds import CLASSES
from oelm.report.plots import Target, forest_by_set
from oelm.report.stats import Interval, interval_text, share_kept
from oelm.report.verdicts import JudgedPair
from oelm.report.words import Words

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
    # Shares of an attention that is worth little say nothing.
    is_telling = any(each.share is not None and each.is_worth for each in kept.values())
    pictures = _picture(*shares, words) if is_telling else gap_charts(findings, judged, words)
    return Section("answer", words("answer.title"), (Text(_sentence(found, words)), *pictures, matrix(found, words)))


def _sentence(found: Found, words: Words) -> str:
    """Say which methods meet the bound; where none was judged yet, which is nearest to its baseline."""
    frozen = {
        line: rows
        for line, rows in found.items()
        if CLASSES[line.place] != "control" and not any(is_uniform(row.pair.arm) for row in rows.values())
    }
    groups: dict[str, list[str]] = {"passed": [], "failed": [], "open": []}
    for line, rows in frozen.items():
        verdicts = {row.judgement.verdict for row in rows.values() if row.judgement.is_look}
        if verdicts:
            name = "failed" if "FAIL" in verdicts else "passed" if verdicts == {"PASS"} else "open"
            groups[name].append(title_of(line, found, words))
    parts = [words(f"answer.{name}", arms=_named(titles, words)) for name, titles in groups.items() if titles]
    if parts:
        return words("answer.judged", parts="; ".join(parts))
    fit = [(line, name, row) for line, rows in frozen.items() for name, row in rows.items()]
    fit = [each for each in fit if each[2].judgement.verdict != "UNFIT_BASELINE"]
    if frozen and not fit:
        return words("answer.unfit")
    # The worst that the interval allows, so that few seeds do not look good by luck.
    gaps = [
        (interval.high if row.pair.arm.metric == "ppl" else -interval.low, title_of(line, found, words), name, row)
        for line, name, row in fit
        if (interval := row.pair.gap.interval) is not None
    ]
    if not gaps:
        return words("verdict.none", comparisons=sum(map(len, found.values())))
    _, arm, name, row = min(gaps, key=lambda gap: gap[0])
    return words("answer.early", arm=arm, gap=row.pair.gap.text, set=name)


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
    spec = forest_by_set(points, sets_of(found), target=target, title=words("kept.axis"), faint="is_worth")
    alt = words("forest.alt", arms=words.listed(dict.fromkeys(point["name"] for point in points)))
    return [Chart("kept", words("kept.caption", least=100 * (LEAST_WORTH - 1)), spec, alt)]


def _table(found: Found, kept: Mapping[ArmKey, _Kept], words: Words) -> Table:
    sets, body = sets_of(found), []
    for line, by_set in found.items():
        cells = []
        for name in sets:
            there = kept[by_set[name].pair.arm.key] if name in by_set else None
            cells += [Cell(""), Cell("")] if there is None else [_share_cell(there, words), _worth_cell(there.worth)]
        body.append((Cell(title_of(line, found, words)), *cells))
    columns = [words("kept.method")]
    for name in sets:
        columns += [name, words("kept.worth_on", set=name)]
    return Table("kept", words("kept.table"), tuple(columns), tuple(body), frozenset(range(1, len(columns))))


def _share_cell(kept: _Kept, words: Words) -> Cell:
    if kept.share is None:
        return Cell(words("kept.undefined"), None, "muted")
    return Cell(_share_text(kept.share), kept.share.value, "" if kept.is_worth else "muted")


def _worth_cell(worth: Interval | None) -> Cell:
    return Cell("") if worth is None else Cell(interval_text(worth, "ppl"), worth.value)


def _share_text(share: Interval) -> str:
    return f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}]"
