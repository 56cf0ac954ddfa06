"""Three classes of frozen attention, never mixed: nothing of Q and K learns, a little on top does, or some of it sometimes."""

from __future__ import annotations

from collections.abc import Sequence

from oelm.method.kind import method_kind
from oelm.report.collect import Arm
from oelm.report.document import Block, Cell, Chart, Mark, Section, Table, Text
from oelm.report.findings import Findings, Pair, method_of, method_text
from oelm.report.ladder import compared
from oelm.report.plots import forest_by_set
from oelm.report.verdicts import BOUNDS, Judged
from oelm.report.words import Words

# The controls last: what as few trainable parameters give without any frame.
CLASSES = ("pure", "little", "partial", "control")
_QK_ROLES = ("query", "key", "query_key_value", "gain", "correction")
# By the class's place and the method's name.
_Found = dict[tuple[int, str], list[Judged]]
_MARKS: dict[str, Mark] = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "warn"}


def classes_section(findings: Findings, judged: Sequence[Judged], words: Words) -> Section | None:
    """Return every language model's arm under its class, with what learns in Q and K, and its gap on every data set."""
    rows = [row for row in judged if _belongs(row.pair)]
    if not any(class_of(row.pair.arm) != "control" for row in rows):
        return None
    found = _by_method(findings, rows, words)
    blocks: list[Block] = [Text(words("classes.text")), _table(found, words), *_forest(found, words)]
    return Section("classes", words("classes.title"), tuple(blocks))


def _belongs(pair: Pair) -> bool:
    return pair.arm.metric == "ppl" and pair.arm.budget != "smoke" and not pair.confounded


def class_of(arm: Arm) -> str:
    """Return the class of an arm that has a baseline: one that freezes nothing is a control."""
    config = arm.runs[0].config
    assert config is not None
    kind = method_kind(config.get("method", {}))
    return "control" if kind == "free" else kind


def learning_in_qk(arm: Arm) -> int | None:
    """Return how many parameters learn on the Q/K side from the first step on; None where Q, K and V are one weight."""
    audit = arm.runs[0].audit
    assert audit is not None
    if "query_key_value" in audit.by_role:
        return None
    return sum(counts["trainable"] for role, counts in audit.by_role.items() if role in _QK_ROLES)


def _by_method(findings: Findings, rows: Sequence[Judged], words: Words) -> _Found:
    """Return the arms of each class and method, in the classes' order."""
    found: _Found = {}
    for row in rows:
        found.setdefault((CLASSES.index(class_of(row.pair.arm)), _name(findings, row.pair, words)), []).append(row)
    return {key: found[key] for key in sorted(found)}


def _sets(found: _Found) -> list[str]:
    return list(dict.fromkeys(_data(row.pair) for rows in found.values() for row in rows))


def _forest(found: _Found, words: Words) -> list[Block]:
    points = []
    for (kind, name), rows in found.items():
        title = f"{name} ({words(f'classes.{CLASSES[kind]}')})"
        for row in rows:
            gap, text = compared(row.pair.arm, row.pair.baseline, row.pair.split)
            if gap is not None:
                verdict = words(f"verdict.{row.judgement.verdict}")
                place = {"name": title, "arm": _data(row.pair), "text": text, "verdict": verdict}
                points.append({**place, "value": gap.value, "low": gap.low, "high": gap.high})
    if not points:
        return []
    bound = BOUNDS["ppl"]
    bound_title = words("forest.bound.ppl", bound=bound)
    spec = forest_by_set(points, _sets(found), bound=bound, title=words("forest.ppl"), bound_title=bound_title)
    alt = words("forest.alt", arms=words.listed(dict.fromkeys(point["name"] for point in points)))
    return [Chart("classes", words("forest.caption.ppl", bound=bound), spec, alt)]


def _table(found: _Found, words: Words) -> Table:
    sets = _sets(found)
    body = tuple(_row(rows, CLASSES[kind], name, sets, words) for (kind, name), rows in found.items())
    columns = (*(words(f"classes.{name}") for name in ("class", "method", "learns", "share")), *sets)
    return Table("classes", words("classes.caption"), columns, body, frozenset({2, 3, *range(4, len(columns))}))


def _name(findings: Findings, pair: Pair, words: Words) -> str:
    if class_of(pair.arm) != "control":
        return method_text(pair.arm, findings.catalog, words)
    # A control has its baseline's method: what tells it apart is the end of its name.
    suffix = pair.arm.experiment.removeprefix(pair.baseline.experiment).strip("-")
    return suffix or method_of(pair.arm, findings.catalog) or pair.arm.experiment


def _data(pair: Pair) -> str:
    manifest = pair.arm.runs[0].manifest
    assert manifest is not None
    variant = pair.arm.variant
    is_plain = variant == "default" or variant.startswith("tuned-")
    return manifest.data.name if is_plain else f"{manifest.data.name} ({variant})"


def _row(rows: Sequence[Judged], kind: str, name: str, sets: Sequence[str], words: Words) -> tuple[Cell, ...]:
    arm, baseline = rows[0].pair.arm, rows[0].pair.baseline
    learns, all_of_it = learning_in_qk(arm), learning_in_qk(baseline)
    share = learns / all_of_it if learns is not None and all_of_it else None
    by_set = {_data(row.pair): row for row in rows}
    return (
        Cell(words(f"classes.{kind}"), CLASSES.index(kind)),
        Cell(name),
        Cell("" if learns is None else f"{learns:,}", learns),
        Cell("" if share is None else f"{100 * share:.1f}%", share),
        *(_gap(by_set.get(each), words) for each in sets),
    )


def _gap(row: Judged | None, words: Words) -> Cell:
    if row is None:
        return Cell("")
    gap, text = compared(row.pair.arm, row.pair.baseline, row.pair.split)
    text = words("across.on_test", gap=text) if row.pair.split == "test" else text
    judgement = row.judgement
    told = f"{text} {words(f'verdict.{judgement.verdict}')}" if judgement.verdict in _MARKS else text
    return Cell(told, gap.value if gap is not None else None, _MARKS.get(judgement.verdict, ""))
