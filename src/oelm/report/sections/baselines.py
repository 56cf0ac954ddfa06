"""Whether baselines are real ones: whether they beat counting, and whether they learnt for too long."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oelm.report.arms import Arm, common_split
from oelm.report.document import Cell, Section, Table, Text
from oelm.report.judge import Reason
from oelm.report.pairs import Findings, Pair, is_uniform, label, split_text
from oelm.report.words import Words
from oelm.runs.find import ArmKey
from oelm.runs.layout import PREDICTIONS, EvaluatedSplit
from oelm.runs.records import Counters, Figures, TextCounter
from oelm.stats import Interval, paired_log_ratio
from oelm.text import fixed

# What a baseline must beat: so much of a 5-gram's perplexity, on every seed.
MOST_OF_FIVE_GRAM = 0.95
# What attention must be worth: the lower end of the perplexity without Q and K over the baseline's. Below, all of it is worth
# little more than the tolerance of the study's target.
LEAST_WORTH = 1.10
# More than evaluations on the same text jitter by.
MOST_ABOVE_MINIMUM = 0.01
# Each run's perplexity of an n-gram model, by fingerprint, split and model.
Counted = dict[tuple[str, EvaluatedSplit, str], list[float]]
_COLUMNS = ("arm", "budget", "on", "ppl", "counter", "counter_ppl", "ratio", "bits", "best", "orders", "above")


@dataclass(frozen=True)
class Standing:
    """A baseline's figures on a split, and how far its last loss is `above` its least.

    `ngram` holds the perplexities of order 1 to 5 on the same text; records made before that have a `bigram` at most.
    """

    arm: Arm
    split: EvaluatedSplit
    ngram: tuple[float, ...]
    bigram: float | None
    above: float
    # Two perplexities of one model of counting on one text, by runs that disagree on it.
    disputed: tuple[float, float] | None = None
    # The best n-gram model of the same text, whatever its order and vocabulary, if recorded.
    best: TextCounter | None = None

    @property
    def counter(self) -> float | None:
        """The perplexity that the baseline is compared with: the 5-gram's, or the bigram's if only that is known."""
        return self.ngram[4] if self.ngram else self.bigram

    @property
    def is_uncounted(self) -> bool:
        """Whether the record was made before the 5-gram was measured."""
        return not self.ngram and self.bigram is not None

    @property
    def ratio(self) -> float | None:
        """The baseline's PPL over the counter's."""
        return self.arm.mean(self.split) / self.counter if self.counter is not None else None

    @property
    def worst(self) -> float | None:
        """The same ratio of the seed with the highest PPL: the 5-gram must be beaten on every seed."""
        return max(self.arm.on(self.split).values()) / self.counter if self.counter is not None else None

    @property
    def bits(self) -> float | None:
        """The bits per byte of the text, which do not depend on the vocabulary: the mean over seeds."""
        figures = [run.figures for run in self.arm.runs]
        found = [each.final_bits_per_byte if self.split == "val" else each.test_bits_per_byte for each in figures]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known and len(known) == len(found) else None

    @property
    def is_behind_best(self) -> bool:
        """Whether the best n-gram model needs fewer bits."""
        return self.best is not None and self.bits is not None and self.bits > self.best.bits_per_byte

    @property
    def is_weak(self) -> bool:
        return self.is_uncounted or (self.worst is not None and self.worst > MOST_OF_FIVE_GRAM)

    @property
    def is_overfitted(self) -> bool:
        return self.above > MOST_ABOVE_MINIMUM


def standings(findings: Findings) -> list[Standing]:
    """Return how good every language model is that arms are compared with."""
    counted = _counted(findings.arms)
    best = {text: found for root in findings.roots for text, found in Counters.read(root).best.items()}
    return [_standing(baseline, counted, best) for baseline, _ in findings.families if baseline.metric == "ppl"]


def _counted(arms: Sequence[Arm]) -> Counted:
    """Return the n-gram perplexities that runs recorded, by fingerprint, split and order."""
    found: Counted = {}
    for run in (run for arm in arms for run in arm.runs):
        for split in PREDICTIONS:
            for order, value in enumerate(run.figures.ngram.get(split, ()), start=1):
                found.setdefault((run.fingerprint, split, f"{order}-gram"), []).append(value)
            if (bigram := _bigram(run.figures, split)) is not None:
                found.setdefault((run.fingerprint, split, "bigram"), []).append(bigram)
    return found


def _bigram(figures: Figures, split: EvaluatedSplit) -> float | None:
    return figures.bigram_ppl if split == "val" else figures.test_bigram_ppl


def _disputed(arm: Arm, split: EvaluatedSplit, counted: Counted) -> tuple[float, float] | None:
    """Return two figures of one model of counting on the arm's text that differ by more than another machine's rounding."""
    texts = {run.fingerprint for run in arm.runs}
    for (data, on, _), values in counted.items():
        if data in texts and on == split and not math.isclose(min(values), max(values), rel_tol=1e-6):
            return min(values), max(values)
    return None


def _standing(arm: Arm, counted: Counted, best: Mapping[str, Mapping[EvaluatedSplit, TextCounter]]) -> Standing:
    split = common_split(arm)
    figures = [run.figures for run in arm.runs]
    # Runs of an arm have the same text, so that one which measured it speaks for those that did not.
    ngrams = [tuple(found.ngram[split]) for found in figures if split in found.ngram]
    bigrams = [value for found in figures if (value := _bigram(found, split)) is not None]
    bigram = statistics.geometric_mean(bigrams) if bigrams else None
    losses = [(run.curve[max(run.curve)], min(run.curve.values())) for run in arm.runs]
    above = statistics.fmean(last / least - 1 if least > 0 else 0.0 for last, least in losses)
    disputed, counter = _disputed(arm, split, counted), best.get(arm.first.fingerprint, {}).get(split)
    return Standing(arm, split, ngrams[0] if ngrams else (), bigram, above, disputed, counter)


def unfit_baselines(findings: Findings) -> dict[ArmKey, Reason]:
    """Return, for every baseline that is no real one or learnt for too long, why: gaps against it decide nothing."""
    found: dict[ArmKey, Reason] = {}
    for standing in standings(findings):
        if standing.disputed is not None:
            found[standing.arm.key] = Reason("disputed_counter", dict(zip(("least", "most"), standing.disputed, strict=True)))
        elif standing.is_uncounted:
            found[standing.arm.key] = Reason("uncounted_baseline", {})
        elif standing.is_weak and standing.worst is not None:
            found[standing.arm.key] = Reason("outcounted_baseline", {"ratio": standing.worst, "most": MOST_OF_FIVE_GRAM})
        elif standing.is_overfitted:
            found[standing.arm.key] = Reason("overfitted_baseline", {"above": 100 * standing.above})
    for key, worth in worths(findings).items():
        if worth.low < LEAST_WORTH:
            values = {"worth": 100 * (worth.value - 1), "least_worth": 100 * (worth.low - 1), "wanted": 100 * (LEAST_WORTH - 1)}
            found.setdefault(key, Reason("little_attention", values))
    return found


def floors(findings: Findings) -> dict[ArmKey, Arm]:
    """Return, by its baseline, the arm whose attention has no Q and K."""
    return {pair.baseline.key: pair.arm for pair in findings.pairs if is_uniform(pair.arm) and not pair.confounded}


def worth_of(pair: Pair, floor: Arm) -> Interval | None:
    """Return what attention is worth in a pair's family: the perplexity without Q and K over the baseline's."""
    return paired_log_ratio(floor.on(pair.split), pair.baseline.on(pair.split))


def worths(findings: Findings) -> dict[ArmKey, Interval]:
    """Return, by baseline, what attention is worth, where it was measured with two seeds or more."""
    measured = floors(findings)
    found = {pair.baseline.key: worth_of(pair, pair.arm) for pair in findings.pairs if pair.arm in measured.values()}
    return {key: worth for key, worth in found.items() if worth is not None}


def baselines_section(findings: Findings, words: Words) -> Section | None:
    """Return the baselines next to n-gram models of the same text."""
    found = standings(findings)
    if not found:
        return None
    columns = tuple(words(f"baselines.{name}") for name in _COLUMNS)
    rows = tuple(_row(standing, words) for standing in found)
    # Records made before have no orders to show, and the best counter is known where somebody asked for it.
    empty = {"orders"} if not any(standing.ngram for standing in found) else set()
    empty |= {"bits", "best"} if not any(standing.best for standing in found) else set()
    shown = [n for n, name in enumerate(_COLUMNS) if name not in empty]
    table = Table("baselines", words("baselines.caption"), columns, rows, frozenset({3, 5, 6, 7, 8, 10}), tuple(shown))
    text = Text(words("baselines.text", most=MOST_OF_FIVE_GRAM, above=100 * MOST_ABOVE_MINIMUM))
    notes = [Text(said, "note") for said in _uncounted(found, words)]
    return Section("baselines", words("baselines.title"), (text, *notes, table))


def _uncounted(found: list[Standing], words: Words) -> list[str]:
    arms = [f"{label(standing.arm)}, {standing.arm.budget}" for standing in found if standing.is_uncounted]
    return [words("baselines.uncounted", arms="; ".join(arms))] if arms else []


def _row(standing: Standing, words: Words) -> tuple[Cell, ...]:
    arm, ratio, counter, bits, best = standing.arm, standing.ratio, standing.counter, standing.bits, standing.best
    mean = arm.mean(standing.split)
    counted_by = words("baselines.bigram") if standing.is_uncounted else words("baselines.five_gram")
    return (
        Cell(label(arm)),
        Cell(arm.budget),
        Cell(split_text(standing.split, words)),
        Cell(fixed(mean, 2), mean),
        Cell("" if counter is None else counted_by),
        Cell("" if counter is None else fixed(counter, 2), counter),
        Cell("" if ratio is None else fixed(ratio, 3), ratio, "warn" if standing.is_weak else ""),
        Cell("" if bits is None else fixed(bits, 3), bits, "warn" if standing.is_behind_best else ""),
        Cell("" if best is None else _best_text(best, words), None if best is None else best.bits_per_byte),
        Cell(" / ".join(fixed(value, 2) for value in standing.ngram)),
        Cell(f"{100 * standing.above:.2f}%", standing.above, "warn" if standing.is_overfitted else ""),
    )


def _best_text(best: TextCounter, words: Words) -> str:
    return words("baselines.best_at", bits=fixed(best.bits_per_byte, 3), order=best.order, vocabulary=best.vocabulary)


def baseline_remarks(findings: Findings, words: Words) -> list[str]:
    """Return remarks on baselines that lose to counting or are overfitted; smoke runs are left out."""
    found = [standing for standing in standings(findings) if standing.arm.budget != "smoke"]
    remarks = _uncounted(found, words)
    for standing in found:
        name = {"arm": label(standing.arm), "budget": standing.arm.budget}
        if standing.disputed is not None:
            least, most = standing.disputed
            remarks.append(words("remark.disputed", **name, least=fixed(least, 2), most=fixed(most, 2)))
        elif standing.is_weak and not standing.is_uncounted and standing.worst is not None:
            remarks.append(words("remark.outcounted", **name, ratio=fixed(standing.worst, 3), most=MOST_OF_FIVE_GRAM))
        if standing.is_behind_best and standing.best is not None and standing.bits is not None:
            at = {"bits": fixed(standing.bits, 3), "best": _best_text(standing.best, words)}
            remarks.append(words("remark.behind_best", **name, **at))
        if standing.is_overfitted:
            remarks.append(words("remark.overfitted", **name, above=100 * standing.above))
    return remarks
