"""Whether baselines are real ones: how far below a plain bigram model they are, and whether they learnt for too long."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from oelm.decimals import fixed
from oelm.report.collect import Arm, ArmKey, Run, common_split
from oelm.report.document import Cell, Section, Table, Text
from oelm.report.findings import Findings, label, split_text
from oelm.report.verdict import Reason
from oelm.report.words import Words
from oelm.train.records import Split

# Above this share of a bigram model's perplexity, context beyond one token is hardly used.
MOST_OF_BIGRAM = 0.6
# More than evaluations on the same text jitter by.
MOST_ABOVE_MINIMUM = 0.01


@dataclass(frozen=True)
class Standing:
    """A baseline's figures on a split; `bigram` is the reference, `above` how far its last loss is above its least."""

    arm: Arm
    split: Split
    bigram: float | None
    above: float

    @property
    def ratio(self) -> float | None:
        """The baseline's PPL over the bigram model's."""
        return self.arm.mean(self.split) / self.bigram if self.bigram is not None else None

    @property
    def is_weak(self) -> bool:
        return self.ratio is not None and self.ratio > MOST_OF_BIGRAM

    @property
    def is_overfitted(self) -> bool:
        return self.above > MOST_ABOVE_MINIMUM


def standings(findings: Findings) -> list[Standing]:
    """Return how every language model that arms are compared with stands."""
    return [_standing(baseline) for baseline, _ in findings.families() if baseline.metric == "ppl"]


def _standing(arm: Arm) -> Standing:
    split = common_split(arm)
    found = [run.figures.bigram_on(split) for run in arm.runs if run.figures is not None]
    # Runs of an arm have the same text, so that one which measured it speaks for those that did not.
    known = [value for value in found if value is not None]
    bigram = statistics.geometric_mean(known) if known else None
    return Standing(arm, split, bigram, statistics.fmean(_above_minimum(run) for run in arm.runs))


def _above_minimum(run: Run) -> float:
    least, last = min(run.curve.values()), run.curve[max(run.curve)]
    return last / least - 1 if least > 0 else 0.0


def unfit_baselines(findings: Findings) -> dict[ArmKey, Reason]:
    """Return, for every baseline that is no real one or learnt for too long, why: gaps against it decide nothing."""
    found: dict[ArmKey, Reason] = {}
    for standing in standings(findings):
        if standing.is_weak and standing.ratio is not None:
            found[standing.arm.key] = Reason("weak_baseline", {"ratio": standing.ratio, "most": MOST_OF_BIGRAM})
        elif standing.is_overfitted:
            found[standing.arm.key] = Reason("overfitted_baseline", {"above": 100 * standing.above})
    return found


def baselines_section(findings: Findings, words: Words) -> Section | None:
    """Return the baselines beside the bigram model of their own text."""
    found = standings(findings)
    if not found:
        return None
    columns = tuple(words(f"baselines.{name}") for name in ("arm", "budget", "on", "ppl", "bigram", "ratio", "above"))
    rows = tuple(_row(standing, words) for standing in found)
    table = Table("baselines", words("baselines.caption"), columns, rows, frozenset({3, 4, 5, 6}))
    limits = {"most": MOST_OF_BIGRAM, "above": 100 * MOST_ABOVE_MINIMUM}
    return Section("baselines", words("baselines.title"), (Text(words("baselines.text", **limits)), table))


def _row(standing: Standing, words: Words) -> tuple[Cell, ...]:
    arm, ratio, bigram = standing.arm, standing.ratio, standing.bigram
    mean = arm.mean(standing.split)
    return (
        Cell(label(arm)),
        Cell(arm.budget),
        Cell(split_text(standing.split, words)),
        Cell(fixed(mean, 2), mean),
        Cell("" if bigram is None else fixed(bigram, 2), bigram),
        Cell("" if ratio is None else fixed(ratio, 3), ratio, "warn" if standing.is_weak else ""),
        Cell(f"{100 * standing.above:.2f}%", standing.above, "warn" if standing.is_overfitted else ""),
    )


def baseline_remarks(findings: Findings, words: Words) -> list[str]:
    """Say which baselines are no real ones, or learnt for too long; smoke proves a path, and is never a result."""
    remarks = []
    for standing in standings(findings):
        name = {"arm": label(standing.arm), "budget": standing.arm.budget}
        if standing.arm.budget == "smoke":
            continue
        if standing.is_weak and standing.ratio is not None:
            remarks.append(words("remark.weak", **name, ratio=fixed(standing.ratio, 2), most=MOST_OF_BIGRAM))
        if standing.is_overfitted:
            remarks.append(words("remark.overfitted", **name, above=100 * standing.above))
    return remarks
