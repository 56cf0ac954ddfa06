"""The table of README: what learns in Q and K, what it costs and saves, from the records of the study.

python studies/headline.py [--lang zh]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from oelm.bench.speed import TimingRecord, read_timings
from oelm.experiments.catalog import load_catalog
from oelm.report.arms import Arm
from oelm.report.build import build_report
from oelm.report.pairs import is_uniform, plain_words
from oelm.report.sections.costs import timing_of
from oelm.report.sections.verdicts import JudgedPair, decided_by
from oelm.report.words import Words

STUDY = Path(__file__).resolve().parent.parent / "results" / "study"
HEADS = {
    "en": (
        "queries and keys (Q, K)",
        "perplexity on {text} [95%]",
        "parameters",
        "training speed [95%]",
        "perplexity within +5%?",
    ),
    "zh": ("Q、K（查询和键）", "{text} 的困惑度 [95%]", "参数", "训练速度 [95%]", "困惑度在 +5% 以内？"),
}
# The rows after the baseline's.
ARMS = (
    "conv-slices-q",
    "conv-slices-q-lowrank",
    "conv-slices-lowrank",
    "conv-slices",
    "conv-frames",
    "conv-half",
    "conv-thin",
    "conv-uniform",
)
TEXTS: dict[str, dict[str, str]] = {
    "en": {
        "baseline": "both learn (the baseline)",
        "tinystories": "TinyStories",
        "stdlib": "Python's standard library",
        "PASS": "yes",
        "FAIL": "no",
        "INCONCLUSIVE": "undecided",
        "few": "too few seeds",
        "one": "one seed, no interval",
    },
    "zh": {
        "baseline": "两者都学习（基线）",
        "tinystories": "TinyStories",
        "stdlib": "Python 标准库",
        "PASS": "是",
        "FAIL": "否",
        "INCONCLUSIVE": "未定",
        "few": "种子太少",
        "one": "一个种子，没有区间",
    },
}


def table(lang: str) -> list[list[str]]:
    """Return the rows of the table, its head first: the baseline, then every arm with a convolution, over all texts."""
    texts, words, catalog = TEXTS[lang], Words(lang), load_catalog()
    report = build_report([STUDY], catalog)
    timings = read_timings(STUDY)
    by_arm: dict[str, dict[str, JudgedPair]] = {}
    for row in report.judged:
        arm, _, data = row.pair.arm.experiment.partition(".")
        if arm in ARMS:
            by_arm.setdefault(arm, {})[data] = row
    sets = sorted({data for found in by_arm.values() for data in found}, key=list(texts).index)
    first, ppl, *others = HEADS[lang]
    rows = [[first, *(ppl.format(text=texts[data]) for data in sets), *others]]
    baselines = {data: row.pair.baseline for found in by_arm.values() for data, row in found.items()}
    figures = [f"{baselines[data].mean('val'):.2f}" for data in sets]
    rows.append([texts["baseline"], *figures, _stored(baselines[sets[0]]), "", ""])
    for arm in sorted(by_arm, key=ARMS.index):
        found = by_arm[arm]
        gaps = [decided_by(found[data], words).text if data in found else "" for data in sets]
        sample = next(iter(found.values())).pair
        speed = _speed(timing_of(sample, timings, catalog))
        rows.append([plain_words(sample, catalog, words), *gaps, _stored(sample.arm), speed, _told(found, texts)])
    return rows


def _stored(arm: Arm) -> str:
    # Uniform attention stores Q and K, which it does not use.
    return "" if is_uniform(arm) else f"{arm.first.audit.total:,}"


def _speed(timing: TimingRecord | None) -> str:
    return "" if timing is None else f"{timing.value:.3f}x [{timing.low:.3f}, {timing.high:.3f}]"


def _told(found: dict[str, JudgedPair], texts: dict[str, str]) -> str:
    """Return the verdict of an arm, once if all texts agree."""
    if any(is_uniform(row.pair.arm) for row in found.values()):
        return ""
    by_text = {
        data: texts.get(row.judgement.verdict, texts["one" if len(row.pair.seeds) < 2 else "few"])
        for data, row in found.items()
    }
    if len({*by_text.values()}) == 1:
        return next(iter(by_text.values()))
    return "; ".join(f"{texts[data]}: {verdict}" for data, verdict in by_text.items())


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lang", default="en", choices=list(TEXTS))
    head, *rows = table(parser.parse_args().lang)
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
