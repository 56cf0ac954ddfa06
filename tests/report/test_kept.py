"""The share of attention's worth that an arm keeps: a quotient with Fieller's interval, and nothing where worth is little."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from oelm.report.document import Chart, Table
from oelm.stats import share_kept
from tests.report.reading import english, names, rows, texts, values
from tests.report.synthetic import write_arm

BASE = [20.0, 20.2, 19.9, 20.1, 20.3]
LUCK = [0.999, 1.001, 1.0, 1.002, 0.998]


def by_seed(values: list[float]) -> dict[int, float]:
    return dict(enumerate(values))


def write_family(root: Path, *, frozen: float = 1.1, uniform: float = 1.4) -> None:
    for name, ratio, luck in (("GPT-01", 1.0, [1.0] * 5), ("GPT-02", frozen, LUCK), ("GPT-02-uniform", uniform, LUCK[::-1])):
        figures = [ratio * value * chance for value, chance in zip(BASE, luck, strict=True)]
        write_arm(root, name, figures, five_gram=2 * max(BASE))


def test_the_share_is_one_minus_the_quotient_of_mean_log_gaps() -> None:
    ours, floor = [1.1 * a * b for a, b in zip(BASE, LUCK, strict=True)], [1.4 * a for a in BASE]
    found = share_kept(by_seed(ours), by_seed(BASE), by_seed(floor))
    assert found is not None
    costs = [math.log(a / b) for a, b in zip(ours, BASE, strict=True)]
    # The floor is the same multiple at every seed, so the quotient is a mean over a constant: Student's interval.
    low, high = stats.t.interval(0.95, 4, loc=np.mean(costs), scale=stats.sem(costs))
    expected = [1 - value / math.log(1.4) for value in (high, float(np.mean(costs)), low)]
    assert [found.low, found.value, found.high] == pytest.approx(expected, rel=1e-9)
    assert found.freedom == 4


@given(
    st.lists(st.tuples(st.floats(0.01, 0.4), st.floats(0.3, 0.9)), min_size=3, max_size=8),
    st.sampled_from([0.8, 0.95]),
)
def test_fieller_holds_the_quotients_that_a_t_test_does_not_reject(pairs: list[tuple[float, float]], level: float) -> None:
    base = {seed: 10.0 for seed in range(len(pairs))}
    ours = {seed: 10 * math.exp(cost) for seed, (cost, _) in enumerate(pairs)}
    floor = {seed: 10 * math.exp(worth) for seed, (_, worth) in enumerate(pairs)}
    found = share_kept(ours, base, floor, level=level)
    if found is None:
        worths = [worth for _, worth in pairs]
        assert stats.ttest_1samp(worths, 0).pvalue >= (1 - level) * (1 - 1e-6)
        return
    for share, is_inside in ((found.low, None), (found.high, None), (found.value, True)):
        # The hypothesis that the share is so: cost - (1 - share) * worth has the mean zero.
        left = [cost - (1 - share) * worth for cost, worth in pairs]
        if np.std(left) < 1e-9:
            continue
        rejected = stats.ttest_1samp(left, 0).pvalue
        if is_inside:
            assert rejected > 1 - level
        else:
            # At an end of the interval the test is just undecided; near doubt 1 the ends run away and digits are lost.
            assert rejected == pytest.approx(1 - level, rel=1e-3)


def test_a_worth_that_may_be_nothing_leaves_the_share_undefined() -> None:
    floor = [20.5, 19.0, 20.9, 19.2, 21.0]
    assert share_kept(by_seed([21.0] * 5), by_seed(BASE), by_seed(floor)) is None


def test_one_common_seed_gives_no_share() -> None:
    assert share_kept({0: 21.0, 1: 21.0}, {0: 20.0, 1: 20.0}, {1: 30.0}) is None


def test_the_report_opens_with_the_share_and_its_picture(tmp_path: Path) -> None:
    write_family(tmp_path)
    document = english(tmp_path)
    assert document.sections[0].name == "answer" and "kept" in names(document)
    kinds = [type(block) for block in document.sections[0].blocks]
    assert kinds.index(Chart) < kinds.index(Table)
    (row,) = rows(document, "kept")
    assert row["method"] == "oelm_freeze (pure)"
    expected = 1 - math.log(1.1) / math.log(1.4)
    assert row["tinystories"].startswith(f"{expected:.2f} [")
    assert row["worth, tinystories"].startswith("+40.0% [")


def test_without_the_floor_there_is_no_share(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", BASE)
    write_arm(tmp_path, "GPT-02", [1.1 * value for value in BASE])
    assert all(section.name != "kept" for section in english(tmp_path).sections)


@pytest.mark.parametrize(("uniform", "is_worth"), [(1.12, True), (1.09, False)])
def test_where_attention_is_worth_little_the_point_is_faint_and_there_is_no_verdict(
    tmp_path: Path, uniform: float, is_worth: bool
) -> None:
    write_family(tmp_path, frozen=1.01, uniform=uniform)
    document = english(tmp_path)
    assert {point["is_worth"] for point in values(document, "kept")} == {is_worth}
    verdict = next(row["verdict"] for row in rows(document, "verdicts") if row["arm / baseline"].startswith("GPT-02 /"))
    assert verdict == ("PASS" if is_worth else "UNFIT BASELINE")
    told = [text for text in texts(document, "verdicts") if "Attention is worth too little here" in text]
    assert bool(told) is not is_worth


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (1.01, "within the bound on every data set judged: both frozen at random (oelm_freeze, +1.0% ["),
        (1.2, "beyond the bound on at least one: both frozen at random (oelm_freeze, +20"),
    ],
)
def test_the_answer_names_the_methods_that_meet_the_bound(tmp_path: Path, factor: float, told: str) -> None:
    write_family(tmp_path, frozen=factor)
    document = english(tmp_path)
    assert texts(document, "answer")[0].startswith("Compared with baselines whose Q and K learn: " + told)
    assert [row["method"] for row in rows(document, "classes")] == ["oelm_freeze", "uniform"]


def test_before_anything_can_be_judged_the_answer_names_what_is_nearest(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", BASE[:2], seeds=range(2))
    write_arm(tmp_path, "GPT-02", [1.1 * BASE[0], 1.101 * BASE[1]], seeds=range(2))
    assert texts(english(tmp_path), "answer")[0].startswith("No method can be judged yet; closest so far")
