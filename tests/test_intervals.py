"""The interval of a mean ratio is Student's, and covers as often as it says."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from oelm.stats import mean_ratio, student_quantile


def test_ratio_of_exact_multiples_is_exact() -> None:
    ratio = mean_ratio([3.0, 6.0, 12.0], [1.0, 2.0, 4.0])
    assert ratio.value == pytest.approx(3.0, rel=1e-15)
    assert ratio.low == pytest.approx(3.0, rel=1e-12) and ratio.high == pytest.approx(3.0, rel=1e-12)


def test_interval_is_students_t_on_log_ratios() -> None:
    ours, theirs = [1.0, 1.1, 0.9, 1.05], [1.3, 1.2, 1.25, 1.4]
    logs = [math.log(t / o) for o, t in zip(ours, theirs, strict=True)]
    low, high = stats.t.interval(0.95, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    ratio = mean_ratio(theirs, ours)
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(low), math.exp(high)), rel=1e-9)


def test_quantiles_are_students() -> None:
    assert [student_quantile(df, 0.95) for df in range(1, 31)] == pytest.approx([stats.t.ppf(0.975, df) for df in range(1, 31)])


def test_one_pair_has_no_interval() -> None:
    ratio = mean_ratio([2.0], [1.0])
    assert ratio.value == 2.0 and (ratio.low, ratio.high) == (0.0, math.inf)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    chance = random.Random(1)
    studies = 400
    covered = 0
    for _ in range(studies):
        ours = [math.exp(chance.gauss(0, 0.1)) for _ in range(6)]
        theirs = [1.2 * math.exp(chance.gauss(0, 0.1)) for _ in range(6)]
        ratio = mean_ratio(theirs, ours)
        covered += ratio.low <= 1.2 <= ratio.high
    # Binomial(400, 0.95): three standard deviations below the mean is 367.
    assert 367 <= covered
