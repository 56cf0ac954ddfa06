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
from oelm.report.pairs import is_uniform, method_of
from oelm.report.sections.baselines import floors
from oelm.report.sections.verdicts import JudgedPair, decided_by
from oelm.report.words import Words
from oelm.stats import share_kept

STUDY = Path(__file__).resolve().parent.parent / "results" / "study"
HEADS = {
    "en": (
        "queries and keys (Q, K)",
        "text",
        "seeds",
        "perplexity [95%]",
        "share kept [95%]",
        "parameters",
        "training speed [95%]",
        "within +5%?",
    ),
    "zh": ("Q、K（查询和键）", "文本", "种子数", "困惑度 [95%]", "保留比例 [95%]", "参数", "训练速度 [95%]", "在 +5% 以内？"),
}
TEXTS: dict[str, dict[str, str]] = {
    "en": {
        "conv-learn": "all of it learns (the baseline)",
        "conv-slices-q": "queries are slices of the layer's input, keys learn",
        "conv-slices-q-lowrank": "the same, with a small learnt correction of the queries",
        "conv-slices": "both are slices, nothing learns",
        "conv-frames": "both are frozen at random, nothing learns",
        "conv-thin": "both learn, an eighth as wide",
        "conv-uniform": "none: every token weighs the same",
        "tinystories": "TinyStories",
        "stdlib": "Python's standard library",
        "PASS": "yes",
        "FAIL": "no",
        "INCONCLUSIVE": "undecided",
        "few": "too few seeds",
        "one": "one seed, no interval",
    },
    "zh": {
        "conv-learn": "全部学习（基线）",
        "conv-slices-q": "查询是该层输入的切片，键学习",
        "conv-slices-q-lowrank": "同上，查询另有少量可学习的修正",
        "conv-slices": "两者都是切片，什么都不学习",
        "conv-frames": "两者随机冻结，什么都不学习",
        "conv-thin": "两者都学习，宽度为八分之一",
        "conv-uniform": "没有：每个词元权重相同",
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
    """Return the rows of the table, its head first: every arm of the study with a convolution, after its baseline."""
    texts = TEXTS[lang]
    report = build_report([STUDY], load_catalog())
    timings = {timing.second: timing for timing in read_timings(STUDY) if timing.shape.short_conv}
    floor_of = floors(report.findings)
    rows = [list(HEADS[lang])]
    named = [row for row in report.judged if row.pair.arm.experiment.split(".")[0] in texts]
    for baseline in {row.pair.baseline.key: row.pair.baseline for row in named}.values():
        data, count = baseline.experiment.split(".")[1], len(baseline.runs)
        name, ppl = texts.get(data, data), f"{baseline.mean('val'):.2f}"
        rows.append([texts["conv-learn"], name, str(count), ppl, "1", _stored(baseline), "", ""])
        family = [row for row in named if row.pair.baseline.key == baseline.key]
        for row in sorted(family, key=lambda row: list(texts).index(row.pair.arm.experiment.split(".")[0])):
            rows.append(_row(row, floor_of.get(baseline.key), timings, texts, lang))
    return rows


def _stored(arm: Arm) -> str:
    return f"{arm.first.audit.total:,}"


def _row(row: JudgedPair, floor: Arm | None, timings: dict[str, TimingRecord], texts: dict[str, str], lang: str) -> list[str]:
    pair, words, catalog = row.pair, Words(lang), load_catalog()
    arm, _, data = pair.arm.experiment.partition(".")
    gap = decided_by(row, words).text
    share = None
    if floor is not None and not is_uniform(pair.arm):
        share = share_kept(pair.arm.on(pair.split), pair.baseline.on(pair.split), floor.on(pair.split))
    kept = "0" if is_uniform(pair.arm) else "" if share is None else f"{share.value:.2f} [{share.low:.2f}, {share.high:.2f}]"
    timing = timings.get(method_of(pair.arm, catalog) or "")
    speed = "" if timing is None else f"{timing.value:.3f}x [{timing.low:.3f}, {timing.high:.3f}]"
    verdict = row.judgement.verdict
    told = texts.get(verdict, "" if is_uniform(pair.arm) else texts["one" if len(pair.seeds) < 2 else "few"])
    return [texts[arm], texts.get(data, data), str(len(pair.seeds)), gap, kept, _stored(pair.arm), speed, told]


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lang", default="en", choices=list(TEXTS))
    head, *rows = table(parser.parse_args().lang)
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
