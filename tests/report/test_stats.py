"""Intervals are Student's on paired values, and their levels pay for many and for repeated comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from oelm.errors import DataError
from oelm.stats import (
    Interval,
    common_seeds,
    corrected_level,
    detectable,
    document_log_ratio,
    example_difference,
    look_level,
    paired_difference,
    paired_log_ratio,
    pooled_log_ratio,
)

BASE = {1: 30.0, 2: 31.0, 3: 30.5, 4: 29.8, 5: 30.2}
FROZEN = {1: 31.1, 2: 32.9, 3: 31.2, 4: 31.4, 5: 31.0}
OTHER = {1: 34.2, 2: 33.0, 3: 33.9, 4: 34.4, 5: 33.1}
PPLS = st.dictionaries(st.integers(0, 9), st.floats(1.0, 1e6), min_size=2)


def ends(interval: Interval | None) -> tuple[float, float, float]:
    assert interval is not None
    return interval.low, interval.value, interval.high


def test_the_ratio_has_students_interval_on_the_logs_of_paired_ratios() -> None:
    logs = [math.log(FROZEN[seed] / BASE[seed]) for seed in BASE]
    low, high = stats.t.interval(0.9, 4, loc=sum(logs) / 5, scale=stats.sem(logs))
    found = paired_log_ratio(FROZEN, BASE, level=0.9)
    # Two ways to the same few sums in double precision.
    assert ends(found) == pytest.approx((math.exp(low), math.exp(sum(logs) / 5), math.exp(high)), rel=1e-12)
    assert found is not None and (found.level, found.freedom) == (0.9, 4)
    assert found.half_width == (found.high - found.low) / 2


def test_the_difference_has_students_interval_on_paired_differences() -> None:
    ours, theirs = {1: 0.91, 2: 0.89, 3: 0.90}, {1: 0.93, 2: 0.92, 3: 0.91}
    differences = [ours[seed] - theirs[seed] for seed in ours]
    low, high = stats.t.interval(0.95, 2, loc=sum(differences) / 3, scale=stats.sem(differences))
    assert ends(paired_difference(ours, theirs)) == pytest.approx((low, -0.02, high), rel=1e-12)


def test_only_seeds_that_both_arms_have_count() -> None:
    assert common_seeds({3: 1.0, 1: 1.0, 7: 1.0}, {1: 1.0, 2: 1.0, 3: 1.0}) == (1, 3)
    assert paired_log_ratio({**FROZEN, 9: 1e9}, {**BASE, 8: 1e-9}) == paired_log_ratio(FROZEN, BASE)
    assert paired_difference({**FROZEN, 9: 1e9}, {**BASE, 8: 1e-9}) == paired_difference(FROZEN, BASE)


@pytest.mark.parametrize("theirs", [{}, {1: 2.0}, {1: 2.0, 8: 2.0}])
def test_fewer_than_two_common_seeds_have_no_interval(theirs: dict[int, float]) -> None:
    assert paired_log_ratio(BASE, theirs) is None
    assert paired_difference(BASE, theirs) is None
    assert pooled_log_ratio({"base": BASE, "few": theirs, "frozen": FROZEN}, "few", "base") is None


@given(PPLS)
def test_the_ratio_of_swapped_arms_is_the_inverse(ours: dict[int, float]) -> None:
    theirs = {seed: 2.0 + seed for seed in ours}
    (low, value, high), swapped = ends(paired_log_ratio(ours, theirs)), ends(paired_log_ratio(theirs, ours))
    # Logs reach about 14 here and half-widths 12.7 times that: exp turns their rounding, 1e-14, into a relative 1e-11.
    inverse = tuple(1 / end if 0 < end < math.inf else math.inf - end for end in reversed(swapped))
    assert (low, value, high) == pytest.approx(inverse, rel=1e-10)


@given(PPLS, st.floats(0.5, 0.98))
def test_a_higher_level_gives_an_interval_around_the_lower_ones(ours: dict[int, float], level: float) -> None:
    theirs = {seed: 2.0 + seed for seed in ours}
    inner, outer = ends(paired_log_ratio(ours, theirs, level=level)), ends(paired_log_ratio(ours, theirs, level=0.99))
    assert outer[0] <= inner[0] <= inner[1] == outer[1] <= inner[2] <= outer[2]


def test_arms_a_world_apart_have_an_open_interval_and_no_overflow() -> None:
    found = paired_log_ratio({1: 1e300, 2: 2.0}, {1: 2.0, 2: 1e300})
    assert found is not None and (found.low, found.high) == (0.0, math.inf)
    assert found.value == pytest.approx(1.0, rel=1e-12)


def test_the_pooled_interval_keeps_the_ratio_and_uses_every_arms_spread() -> None:
    arms = {"base": BASE, "frozen": FROZEN, "other": OTHER}
    own, pooled = paired_log_ratio(FROZEN, BASE), pooled_log_ratio(arms, "frozen", "base")
    assert own is not None and pooled is not None
    assert pooled.value == own.value
    spreads = [stats.tvar([math.log(arm[seed] / BASE[seed]) for seed in BASE]) for arm in (FROZEN, OTHER)]
    half = stats.t.ppf(0.975, pooled.freedom) * math.sqrt(sum(spreads) / 2 / 5)
    # Two ways to the same few sums in double precision.
    assert math.log(pooled.high / pooled.value) == pytest.approx(half, rel=1e-10)


def test_one_arm_alone_is_pooled_with_nothing() -> None:
    pooled = pooled_log_ratio({"base": BASE, "frozen": FROZEN, "single": {1: 40.0}}, "frozen", "base")
    own = paired_log_ratio(FROZEN, BASE)
    assert ends(pooled) == pytest.approx(ends(own), rel=1e-12)
    assert own is not None and pooled is not None and pooled.freedom == pytest.approx(own.freedom, rel=1e-12)


def test_arms_that_move_together_add_no_freedom_and_independent_ones_add_theirs() -> None:
    flat = dict.fromkeys(range(1, 6), 10.0)
    up = {seed: 10.0 * math.exp(step) for seed, step in enumerate((-0.02, -0.01, 0.0, 0.01, 0.02), start=1)}
    # Orthogonal to `up`, and of the same sum of squares: 0.001.
    bend = {seed: 10.0 * math.exp(step * math.sqrt(0.001 / 14)) for seed, step in enumerate((2, -1, -2, -1, 2), start=1)}
    together = pooled_log_ratio({"flat": flat, "a": up, "b": dict(up)}, "a", "flat")
    apart = pooled_log_ratio({"flat": flat, "a": up, "b": bend}, "a", "flat")
    assert together is not None and apart is not None
    assert (together.freedom, apart.freedom) == pytest.approx((4, 8), rel=1e-9)


@given(st.lists(PPLS, min_size=1, max_size=5))
def test_pooled_freedom_is_at_least_one_and_at_most_the_sum_over_arms(others: list[dict[int, float]]) -> None:
    base = {seed: 20.0 for seed in range(10)}
    arms = {"base": base, **{str(number): arm for number, arm in enumerate(others)}}
    found = pooled_log_ratio(arms, "0", "base")
    nominal = sum(len(arm) - 1 for arm in others)
    # Rounding of sums of at most fifty squares.
    assert found is not None and 1 - 1e-9 <= found.freedom <= nominal * (1 + 1e-9)


def test_arms_without_any_spread_are_pooled_to_a_point() -> None:
    twice = {seed: 2 * ppl for seed, ppl in BASE.items()}
    found = pooled_log_ratio({"base": BASE, "twice": twice}, "twice", "base")
    assert found is not None and found.half_width < 1e-12 and found.freedom >= 1
    exact = pooled_log_ratio({"base": BASE, "same": dict(BASE)}, "same", "base")
    assert exact == Interval(1.0, 1.0, 1.0, 0.95, 4)


def test_examples_have_students_interval_on_their_mean_over_seeds() -> None:
    ours = [[True, True, False, True], [True, False, False, True]]
    theirs = [[True, True, True, True], [True, True, False, False]]
    means = [0.0, -0.5, -0.5, 0.5]
    low, high = stats.t.interval(0.95, 3, loc=-0.125, scale=stats.sem(means))
    found = example_difference(ours, theirs)
    assert ends(found) == pytest.approx((low, -0.125, high), rel=1e-12)
    assert found is not None and found.freedom == 3


def test_the_interval_over_examples_is_the_one_of_a_paired_bootstrap_and_of_mcnemar() -> None:
    chance = np.random.default_rng(3)
    theirs = chance.random((1, 872)) < 0.85
    ours = theirs ^ (chance.random((1, 872)) < 0.06)
    found = example_difference(ours, theirs)
    assert found is not None
    drawn = (ours[0].astype(float) - theirs[0])[chance.integers(0, 872, (4000, 872))].mean(axis=1)
    # A percentile of 4,000 draws is off by up to 4% of the sd here (four standard errors: sqrt(.025 * .975 / 4000) / density).
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.17 * float(drawn.std()))
    lost, gained = int((theirs & ~ours).sum()), int((ours & ~theirs).sum())
    # McNemar's statistic counts the examples that differ; away from no difference their variance is less by its square.
    error = math.sqrt(lost + gained - (lost - gained) ** 2 / 872) / 872
    assert found.half_width == pytest.approx(1.96269 * error, rel=1e-3)


def test_what_is_detectable_is_detected_with_the_power_asked_for() -> None:
    for level in (0.95, 0.99):
        for freedom in (1, 2, 4, 871):
            error = 0.013
            quantile = float(stats.t.ppf(1 - (1 - level) / 2, freedom))
            found = detectable(Interval(0.05, 0.05 - quantile * error, 0.05 + quantile * error, level, freedom))
            assert 1 - stats.nct.cdf(quantile, freedom, found / error) == pytest.approx(0.8, abs=1e-5), (freedom, level)


@pytest.mark.parametrize("freedom", [1, 2, 4])
def test_what_is_detectable_grows_with_the_level_without_a_jump(freedom: int) -> None:
    def found(quantile: float) -> float:
        level = 1 - 2 * float(stats.t.sf(quantile, freedom))
        return detectable(Interval(0.0, -quantile, quantile, level, freedom)) / quantile

    # Either side of where the exact search gives way: the normal part is 1/1000 of the shift there.
    assert found(998.0) == pytest.approx(found(1002.0), rel=0.003)


def test_even_the_hundredth_look_says_what_it_could_see() -> None:
    found = paired_difference({0: 0.9, 1: 0.92}, {0: 0.9, 1: 0.9}, level=look_level(0.95, 100))
    assert found is not None and found.half_width < detectable(found) < math.inf


def test_detection_in_simulated_studies_is_as_often_as_promised() -> None:
    chance = np.random.default_rng(5)
    error = 0.02 / math.sqrt(5)
    quantile = float(stats.t.ppf(0.975, 4))
    shift = detectable(Interval(0.0, -quantile * error, quantile * error, 0.95, 4))
    studies = shift + 0.02 * chance.standard_normal((4000, 5))
    intervals = [paired_difference(dict(enumerate(study)), dict.fromkeys(range(5), 0.0)) for study in studies]
    seen = [interval is not None and interval.low > 0 for interval in intervals]
    # Four standard errors of a share of 0.8 among 4,000.
    assert np.mean(seen) == pytest.approx(0.8, abs=0.026)


def test_one_example_or_no_seed_has_no_interval_over_examples() -> None:
    assert example_difference([[True], [False]], [[True], [True]]) is None
    assert example_difference([[], []], [[], []]) is None


@pytest.mark.parametrize(
    ("ours", "theirs"), [([[True, False]], [[True]]), ([[True, False]] * 2, [[True, False]]), ([True, False], [True, False])]
)
def test_outcomes_on_other_examples_or_seeds_are_refused(ours: list[list[bool]], theirs: list[list[bool]]) -> None:
    with pytest.raises(DataError, match="the same seeds and the same examples; compare runs that were judged on the same data"):
        example_difference(ours, theirs)


@given(st.floats(0.5, 0.999), st.integers(1, 1000))
def test_the_errors_of_all_comparisons_add_up_to_that_of_the_level(level: float, comparisons: int) -> None:
    # One minus a level near one loses digits: 1e-16 of absolute rounding, a thousand times over.
    assert comparisons * (1 - corrected_level(level, comparisons)) == pytest.approx(1 - level, abs=1e-12)
    assert corrected_level(level, 1) == pytest.approx(level, rel=1e-15)


@given(st.floats(0.5, 0.999), st.integers(1, 200))
def test_one_sided_errors_of_any_number_of_looks_stay_under_that_of_the_level(level: float, looks: int) -> None:
    spent = math.fsum((1 - look_level(level, look)) / 2 for look in range(1, looks + 1))
    # Each level is rounded to 1e-16.
    assert spent < 1 - level + 200e-16


def test_the_first_look_costs_nothing_and_each_later_one_halves_the_error() -> None:
    assert [look_level(0.95, look) for look in (1, 2, 3)] == pytest.approx([0.95, 0.975, 0.9875], rel=1e-15)


def test_even_the_hundredth_look_has_an_interval() -> None:
    found = paired_log_ratio(FROZEN, BASE, level=look_level(0.95, 100))
    assert found is not None and found.low < 1 < found.high < math.inf


def test_the_interval_over_documents_is_that_of_a_ratio_of_sums_over_documents() -> None:
    draw = np.random.default_rng(3)
    sizes = draw.integers(50, 400, 300).astype(float)
    theirs = np.stack([sizes * draw.normal(2.0, 0.3, 300) for _ in range(3)])
    ours = theirs + sizes * draw.normal(0.05, 0.1, (3, 300))
    found = document_log_ratio(ours, theirs, sizes)
    assert found is not None
    gains = (ours - theirs).mean(axis=0)
    mean = gains.sum() / sizes.sum()
    # The delta method's standard error of a quotient of sums; 4,000 resamples give an end to a few percent of it.
    error = math.sqrt(((gains - mean * sizes) ** 2).sum()) / sizes.sum()
    assert found.value == pytest.approx(math.exp(mean), rel=1e-12)
    assert math.log(found.high / found.low) == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert document_log_ratio(ours, theirs, sizes) == found


@pytest.mark.parametrize("shape", [(0, 5), (2, 1)])
def test_no_seed_or_one_document_has_no_interval_over_documents(shape: tuple[int, int]) -> None:
    assert document_log_ratio(np.ones(shape), np.ones(shape), np.ones(shape[1])) is None


ODD = [math.nan, math.inf, -math.inf]


def test_a_perplexity_that_has_no_logarithm_gives_no_interval() -> None:
    cases: list[float] = [*ODD, 0.0, -1.0]
    for is_ours in (True, False):
        for figure in cases:
            odd, plain = {0: 30.0, 1: 31.0, 7: figure}, {0: 29.0, 1: 30.5, 7: 30.0}
            ours, theirs = (odd, plain) if is_ours else (plain, odd)
            told = f"seed 7 has the figure {figure}: an interval needs finite numbers above zero"
            with pytest.raises(DataError, match=told):
                paired_log_ratio(ours, theirs)
            with pytest.raises(DataError, match=told):
                pooled_log_ratio({"a": ours, "b": theirs}, "a", "b")
            # A seed that the other arm lacks is in no interval.
            assert paired_log_ratio(odd, {0: 29.0, 1: 30.5}) is not None, (figure, is_ours)


@pytest.mark.parametrize("figure", ODD)
def test_an_accuracy_that_is_no_number_gives_no_interval(figure: float) -> None:
    with pytest.raises(DataError, match=f"seed 1 has the figure {figure}"):
        paired_difference({0: 0.5, 1: figure}, {0: 0.4, 1: 0.5})
    with pytest.raises(DataError, match="hold NaN or infinity"):
        example_difference([[0.0, figure]], [[1.0, 1.0]])
