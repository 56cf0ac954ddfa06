"""How much of attention's worth an arm keeps: 0 is no better than attention without Q and K, 1 is as good as the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oelm.report.baselines import LEAST_WORTH, floors, worth_of
from oelm.report.classes import Found, lines_of, sets_of, title_of
from oelm.report.collect import Arm, ArmKey
from oelm.report.document import Block, Cell, Chart, Section, Table, Text
from oelm.report.findings import Findings, Pair, is_uniform
from oelm.report.plots import Target, forest_by_set
from oelm.report.stats import Interval, interval_text, share_kept
from oelm.report.verdicts import Judged
from oelm.report.words import Words


def kept_section(findings: Findings, judged: Sequence[Judged], words: Words) -> Section | None:
    """Return the share of attention's worth that every arm keeps, on every data set where that worth was measured."""
    by_baseline = floors(findings)
    rows = [row for row in judged if row.pair.baseline.key in by_baseline and not is_uniform(row.pair.arm)]
    found = lines_of(findings, rows, words)
    shares = {row.pair.arm.key: _share(row.pair, by_baseline) for row in rows}
    if not any(shares.values()):
        return None
    worths = {row.pair.arm.key: worth_of(row.pair, by_baseline[row.pair.baseline.key]) for row in rows}
    shown = (found, shares, worths, words)
    blocks: list[Block] = [Text(words("kept.text")), *_picture(*shown), _table(*shown)]
    return Section("kept", words("kept.title"), tuple(blocks))


def _share(pair: Pair, by_baseline: Mapping[ArmKey, Arm]) -> Interval | None:
    floor = by_baseline[pair.baseline.key]
    return share_kept(pair.arm.on(pair.split), pair.baseline.on(pair.split), floor.on(pair.split))


def _is_worth(worth: Interval | None) -> bool:
    return worth is not None and worth.low >= LEAST_WORTH


def _picture(
    found: Found, shares: Mapping[ArmKey, Interval | None], worths: Mapping[ArmKey, Interval | None], words: Words
) -> list[Block]:
    points = []
    for line, by_set in found.items():
        for name, row in by_set.items():
            share, worth = shares[row.pair.arm.key], worths[row.pair.arm.key]
            if share is None or worth is None:
                continue
            place = {"name": title_of(line, found, words), "arm": name, "is_worth": _is_worth(worth)}
            told = {"text": _share_text(share), "verdict": words("kept.worth", worth=interval_text(worth, "ppl"))}
            points.append({**place, **told, "value": share.value, "low": share.low, "high": share.high})
    if not points:
        return []
    target = Target(1.0, words("kept.all"), words("kept.all"), words("kept.none"), nothing=0.0)
    spec = forest_by_set(points, sets_of(found), target=target, title=words("kept.axis"), faint="is_worth")
    alt = words("forest.alt", arms=words.listed(dict.fromkeys(point["name"] for point in points)))
    return [Chart("kept", words("kept.caption", least=100 * (LEAST_WORTH - 1)), spec, alt)]


def _table(
    found: Found, shares: Mapping[ArmKey, Interval | None], worths: Mapping[ArmKey, Interval | None], words: Words
) -> Table:
    sets, body = sets_of(found), []
    for line, by_set in found.items():
        cells = []
        for name in sets:
            key = by_set[name].pair.arm.key if name in by_set else None
            share, worth = (None, None) if key is None else (shares[key], worths[key])
            cells += [Cell("") if key is None else _share_cell(share, worth, words), _worth_cell(worth)]
        body.append((Cell(title_of(line, found, words)), *cells))
    columns = [words("kept.method")]
    for name in sets:
        columns += [name, words("kept.worth_on", set=name)]
    return Table("kept", words("kept.table"), tuple(columns), tuple(body), frozenset(range(1, len(columns))))


def _share_cell(share: Interval | None, worth: Interval | None, words: Words) -> Cell:
    if share is None:
        return Cell(words("kept.undefined"), None, "muted")
    return Cell(_share_text(share), share.value, "" if _is_worth(worth) else "muted")


def _worth_cell(worth: Interval | None) -> Cell:
    return Cell("") if worth is None else Cell(interval_text(worth, "ppl"), worth.value)


def _share_text(share: Interval) -> str:
    return f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}]"
