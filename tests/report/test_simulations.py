"""Simulated studies: intervals cover as often as they say, and a PASS at the boundary is as rare as promised.

Every study goes through the product's own functions. Seeds are fixed. With 2,000 studies a rate of 95% has a standard error
of 0.49 points, so the band 93-97 is four of them either way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import pytest

from oelm.experiments.catalog import Criterion
from oelm.report.judge import Judgement, judge, judge_together
from oelm.stats import (
    Interval,
    corrected_level,
    example_difference,
    paired_difference,
    paired_log_ratio,
    pooled_log_ratio,
)

STUDIES = 2000
BOUND = 1.05
CRITERION = Criterion(ppl_ratio_at_most=BOUND)
SPREADS = [0.005, 0.02, 0.05]
Draws = npt.NDArray[np.float64]


def by_seed(values: Draws) -> dict[int, float]:
    return dict(enumerate(values.tolist(), start=1))


def paired_studies(num_seeds: int, spread: float, *, seed: int) -> Iterable[tuple[dict[int, float], dict[int, float]]]:
    """Yield PPLs whose true ratio is the bound; the seeds' own luck is large, shared by both arms, and must cancel."""
    # Other draws at every spread: the same ones, stretched, would give the same verdicts.
    chance = np.random.default_rng([seed, num_seeds, round(1000 * spread)])
    theirs = 30 * np.exp(chance.normal(0, 0.2, (STUDIES, num_seeds)))
    ours = BOUND * theirs * np.exp(chance.normal(0, spread, (STUDIES, num_seeds)))
    return ((by_seed(mine), by_seed(reference)) for mine, reference in zip(ours, theirs, strict=True))


def coverage(intervals: Iterable[Interval | None], truth: float) -> float:
    found = [interval for interval in intervals if interval is not None]
    assert len(found) == STUDIES
    return sum(interval.low <= truth <= interval.high for interval in found) / STUDIES


def judged(
    ours: dict[int, float], theirs: dict[int, float], *, planned: int, look: int, comparisons: int = 1, share: int | None = None
) -> Judgement:
    return judge(
        ours,
        theirs,
        kind="language_model",
        criterion=CRITERION,
        planned=planned,
        look=look,
        comparisons=comparisons,
        share=share,
        confounded_by=(),
    )


def first(seeds: dict[int, float], count: int) -> dict[int, float]:
    return {seed: seeds[seed] for seed in range(1, count + 1)}


@pytest.mark.parametrize("num_seeds", [3, 5])
@pytest.mark.parametrize("spread", SPREADS)
def test_ratio_intervals_cover_as_often_as_they_say(num_seeds: int, spread: float) -> None:
    studies = paired_studies(num_seeds, spread, seed=0)
    assert 0.93 <= coverage((paired_log_ratio(ours, theirs) for ours, theirs in studies), BOUND) <= 0.97


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_difference_intervals_cover_as_often_as_they_say(num_seeds: int) -> None:
    chance = np.random.default_rng(20 + num_seeds)
    theirs = 0.9 + chance.normal(0, 0.02, (STUDIES, num_seeds))
    ours = theirs - 0.05 + chance.normal(0, 0.01, (STUDIES, num_seeds))
    pairs = zip(ours, theirs, strict=True)
    assert 0.93 <= coverage((paired_difference(by_seed(mine), by_seed(other)) for mine, other in pairs), -0.05) <= 0.97


# A verdict depends on the ratio of the mean to the spread alone, so that one spread stands for all.
@pytest.mark.parametrize("num_seeds", [3, 5])
def test_a_single_look_at_the_boundary_passes_falsely_in_under_a_twentieth(num_seeds: int) -> None:
    studies = paired_studies(num_seeds, 0.02, seed=10)
    verdicts = [judged(ours, theirs, planned=num_seeds, look=1).verdict for ours, theirs in studies]
    # Half of the two-sided 5% is expected; a rate near zero would mean that the test cannot fail.
    assert 0.01 < verdicts.count("PASS") / STUDIES < 0.05
    assert 0.01 < verdicts.count("FAIL") / STUDIES < 0.05


def verdict_after_adding(ours: dict[int, float], theirs: dict[int, float], sizes: list[int]) -> str:
    """Look, and add seeds as long as the verdict is open; the last verdict."""
    verdict = "INCONCLUSIVE"
    for look, count in enumerate(sizes, start=1):
        if verdict == "INCONCLUSIVE":
            verdict = judged(first(ours, count), first(theirs, count), planned=sizes[0], look=look).verdict
    return verdict


@pytest.mark.parametrize("sizes", [[3, 6, 9], [5, 8, 11], [5, 6, 7, 8, 9, 10, 11, 12]], ids=["3+3+3", "5+3+3", "one-by-one"])
def test_adding_seeds_after_looks_passes_falsely_in_under_a_twentieth(sizes: list[int]) -> None:
    studies = paired_studies(sizes[-1], 0.02, seed=30)
    verdicts = [verdict_after_adding(ours, theirs, sizes) for ours, theirs in studies]
    assert 0.01 < verdicts.count("PASS") / STUDIES < 0.05


def arm_studies(num_seeds: int, num_arms: int, baseline_spread: float, *, seed: int) -> Iterable[dict[str, dict[int, float]]]:
    """Yield studies of arms that vary alike, all at the bound, against one baseline of its own spread."""
    chance = np.random.default_rng(seed)
    luck = np.exp(chance.normal(0, 0.2, (STUDIES, 1, num_seeds)))
    theirs = 30 * luck * np.exp(chance.normal(0, baseline_spread, (STUDIES, 1, num_seeds)))
    ours = BOUND * 30 * luck * np.exp(chance.normal(0, 0.02, (STUDIES, num_arms, num_seeds)))
    for arms in np.concatenate([theirs, ours], axis=1):
        yield {"base": by_seed(arms[0]), **{f"arm-{n}": by_seed(arm) for n, arm in enumerate(arms[1:])}}


@pytest.mark.parametrize(("num_arms", "baseline_spread"), [(4, 0.0), (4, 0.02), (4, 0.06), (2, 0.06)])
def test_pooled_intervals_of_five_seeds_cover_as_often_as_they_say(num_arms: int, baseline_spread: float) -> None:
    studies = arm_studies(5, num_arms, baseline_spread, seed=40)
    assert 0.93 <= coverage((pooled_log_ratio(arms, "arm-0", "base") for arms in studies), BOUND) <= 0.97


@pytest.mark.parametrize("baseline_spread", [0.0, 0.06])
def test_pooled_intervals_of_three_seeds_never_cover_less_than_they_say(baseline_spread: float) -> None:
    # Three seeds cannot tell how far arms depend on each other; the degrees of freedom then err on the careful side.
    studies = arm_studies(3, 4, baseline_spread, seed=41)
    assert 0.94 <= coverage((pooled_log_ratio(arms, "arm-0", "base") for arms in studies), BOUND)


def test_pooling_narrows_the_interval_of_three_seeds() -> None:
    widths = [
        (pooled.half_width, own.half_width)
        for arms in arm_studies(3, 4, 0.005, seed=42)
        if (pooled := pooled_log_ratio(arms, "arm-0", "base")) and (own := paired_log_ratio(arms["arm-0"], arms["base"]))
    ]
    pooled_mean, own_mean = np.mean(widths, axis=0)
    assert pooled_mean < 0.9 * own_mean


def shares(*, comparisons: int) -> dict[str, float]:
    """Return in which share of studies at least one of eight arms at the bound gets a verdict, for each verdict."""
    counts: Counter[str] = Counter()
    for arms in arm_studies(5, 8, 0.005, seed=50):
        theirs = arms.pop("base")
        counts.update({judged(ours, theirs, planned=5, look=1, comparisons=comparisons).verdict for ours in arms.values()})
    return {verdict: count / STUDIES for verdict, count in counts.items()}


def test_of_eight_comparisons_any_errs_in_at_most_a_twentieth() -> None:
    found = shares(comparisons=8)
    assert 0.01 < found["PASS"] <= 0.05
    assert 0.01 < found["FAIL"] <= 0.05


def judge_of(ours: dict[int, float], theirs: dict[int, float]) -> Callable[[int], Judgement]:
    return lambda share: judged(ours, theirs, planned=5, look=1, comparisons=8, share=share)


@pytest.mark.parametrize("sure", [2, 7])
def test_of_arms_at_the_bound_any_errs_in_at_most_a_twentieth_however_many_others_are_sure(sure: int) -> None:
    counts: Counter[str] = Counter()
    for arms in arm_studies(5, 8, 0.005, seed=52):
        theirs = arms.pop("base")
        # The first are far from the bound, on both sides of it.
        moved = {n: {seed: ppl * (1.3, 0.7)[n % 2] for seed, ppl in ours.items()} for n, ours in enumerate(arms.values())}
        shown = [moved[n] if n < sure else ours for n, ours in enumerate(arms.values())]
        found = judge_together([judge_of(ours, theirs) for ours in shown])
        counts.update({one.verdict for one in found[sure:]})
    for verdict in ("PASS", "FAIL"):
        assert 0.005 < counts[verdict] / STUDIES <= 0.05, verdict


def test_intervals_of_eight_comparisons_hold_together_as_often_as_they_say() -> None:
    level = corrected_level(0.95, 8)
    missed = 0
    for arms in arm_studies(5, 8, 0.005, seed=51):
        theirs = arms.pop("base")
        intervals = [paired_log_ratio(ours, theirs, level=level) for ours in arms.values()]
        missed += any(interval is None or not interval.low <= BOUND <= interval.high for interval in intervals)
    # At most 5%, and three standard errors of 0.49 points for the luck of 2,000 studies.
    assert missed / STUDIES <= 0.065


def test_eight_comparisons_would_err_often_without_the_correction() -> None:
    assert shares(comparisons=1)["PASS"] > 0.1


@pytest.mark.parametrize("num_seeds", [1, 3])
@pytest.mark.parametrize("num_examples", [100, 872])
def test_example_intervals_cover_as_often_as_they_say(num_seeds: int, num_examples: int) -> None:
    chance = np.random.default_rng(60 + num_seeds)
    # Hard and easy examples, on which both arms err together; ours is right with a chance lower by 0.02 on each.
    easy = chance.uniform(0.5, 1.0, (STUDIES, 1, num_examples))
    theirs = chance.random((STUDIES, num_seeds, num_examples)) < easy
    ours = chance.random((STUDIES, num_seeds, num_examples)) < easy - 0.02
    found = (example_difference(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert 0.93 <= coverage(found, -0.02) <= 0.97


def test_studies_draw_what_they_say() -> None:
    logs = [math.log(ours[1] / theirs[1]) for ours, theirs in paired_studies(3, 0.02, seed=1)]
    # Standard errors of 2,000 draws: 0.00045 for the mean and 0.00032 for the sd; four of each.
    assert np.mean(logs) == pytest.approx(math.log(BOUND), abs=0.0018)
    assert np.std(logs) == pytest.approx(0.02, abs=0.0013)
