"""A verdict is given at the planned number of seeds, from the whole interval, and every look at a comparison is counted."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oelm.errors import DataError, OelmError
from oelm.experiments.catalog import Criterion
from oelm.report.judge import Judgement, Looks, comparison_key, judge, judge_together
from oelm.stats import paired_difference, paired_log_ratio

RATIO = Criterion(ppl_ratio_at_most=1.05)
LOSS = Criterion(accuracy_loss_at_most=0.05)
DAY = datetime.date(2025, 3, 1)
KEY = comparison_key("GPT-02", "laptop", "default")
BASE = {1: 30.0, 2: 31.0, 3: 30.5, 4: 29.8, 5: 30.2}
# Ratios spread by about half a percent around their mean.
WOBBLE = {1: 1.004, 2: 0.996, 3: 1.006, 4: 0.995, 5: 0.999}


def scaled(ratio: float, *, seeds: int = 5) -> dict[int, float]:
    return {seed: ratio * WOBBLE[seed] * BASE[seed] for seed in list(BASE)[:seeds]}


def judged(ours: dict[int, float], theirs: dict[int, float] | None = BASE, **changes: Any) -> Judgement:
    plain: dict[str, Any] = {
        "metric": "ppl",
        "criterion": RATIO,
        "planned": 5,
        "look": 1,
        "comparisons": 1,
        "confounded_by": (),
    }
    return judge(ours, theirs, **{**plain, **changes})


def codes(judgement: Judgement) -> list[str]:
    return [reason.code for reason in judgement.reasons]


def test_a_ratio_is_judged_by_its_whole_interval() -> None:
    cases: list[tuple[float, str, str]] = [
        (0.9, "PASS", "interval_inside"),
        (1.03, "PASS", "interval_inside"),
        (1.05, "INCONCLUSIVE", "interval_across"),
        (1.08, "FAIL", "interval_outside"),
    ]
    for ratio, verdict, code in cases:
        found = judged(scaled(ratio))
        assert (found.verdict, codes(found), found.is_look) == (verdict, [code], True), (ratio, verdict)
        assert found.interval == paired_log_ratio(scaled(ratio), BASE), (ratio, verdict)
        assert found.interval is not None, (ratio, verdict)
        assert found.reasons[0].values == {"bound": 1.05, "low": found.interval.low, "high": found.interval.high}, (
            ratio,
            verdict,
        )


def test_an_accuracy_is_judged_by_the_whole_interval_of_its_loss() -> None:
    cases: list[tuple[float, str]] = [(-0.10, "PASS"), (0.0, "PASS"), (0.04, "PASS"), (0.05, "INCONCLUSIVE"), (0.06, "FAIL")]
    for loss, verdict in cases:
        theirs = {seed: 0.8 + 0.01 * seed for seed in range(1, 6)}
        ours = {seed: theirs[seed] - loss + 0.2 * (WOBBLE[seed] - 1) for seed in theirs}
        found = judged(ours, theirs, metric="accuracy", criterion=LOSS)
        assert found.verdict == verdict, (loss, verdict)
        assert found.interval == paired_difference(ours, theirs), (loss, verdict)
        assert found.reasons[0].values["bound"] == -0.05, (loss, verdict)


@given(
    st.dictionaries(st.integers(1, 12), st.floats(1.0, 100.0)),
    st.one_of(st.none(), st.dictionaries(st.integers(1, 12), st.floats(1.0, 100.0))),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_no_data_pass_with_less_than_the_planned_seeds_or_with_a_bound_in_the_interval(
    ours: dict[int, float], theirs: dict[int, float] | None, planned: int, look: int
) -> None:
    found = judged(ours, theirs, planned=planned, look=look)
    if found.verdict == "PASS":
        assert found.interval is not None and found.interval.high <= 1.05
        assert found.num_seeds >= max(planned, 2)
    if found.verdict == "FAIL":
        assert found.interval is not None and found.interval.low > 1.05
        assert found.num_seeds >= max(planned, 2)


@given(st.integers(1, 20), st.integers(1, 6))
def test_correcting_never_turns_another_verdict_into_a_pass_or_a_fail(comparisons: int, look: int) -> None:
    for ratio in (1.0, 1.042, 1.046, 1.05, 1.054, 1.06, 1.2):
        plain, corrected = judged(scaled(ratio)), judged(scaled(ratio), comparisons=comparisons, look=look)
        assert corrected.verdict in (plain.verdict, "INCONCLUSIVE")


@pytest.mark.parametrize("seeds", [2, 3, 4])
def test_fewer_seeds_than_planned_are_exploratory_with_their_interval(seeds: int) -> None:
    found = judged(scaled(0.5, seeds=seeds))
    assert (found.verdict, found.is_look, found.num_seeds) == ("EXPLORATORY", False, seeds)
    assert found.interval == paired_log_ratio(scaled(0.5, seeds=seeds), BASE)
    assert found.reasons[0].code == "fewer_seeds" and found.reasons[0].values == {"found": seeds, "planned": 5}


@pytest.mark.parametrize("planned", [1, 5])
def test_one_seed_has_its_value_but_no_interval_and_no_verdict(planned: int) -> None:
    found = judged({2: 31.0}, {2: 31.0}, planned=planned)
    assert (found.verdict, found.interval, found.is_look) == ("ONE_SEED", None, False)
    assert found.reasons[0].values == {"seed": 2, "value": 1.0}
    accuracy = judged({2: 0.5}, {2: 0.75}, planned=planned, metric="accuracy", criterion=LOSS)
    assert accuracy.reasons[0].values == {"seed": 2, "value": -0.25}


def test_a_confounded_comparison_gets_no_verdict_however_good() -> None:
    found = judged(scaled(0.5), confounded_by=("optim.lr",))
    assert (found.verdict, found.is_look) == ("CONFOUNDED", False)
    assert found.reasons[0].values == {"settings": ("optim.lr",)}


def test_what_is_missing_is_said() -> None:
    cases: list[tuple[dict[int, float], dict[int, float] | None, Criterion | None, str, str]] = [
        ({}, BASE, RATIO, "UNFINISHED", "not_run"),
        (BASE, None, RATIO, "NO_BASELINE", "no_baseline"),
        (BASE, {}, RATIO, "NO_BASELINE", "baseline_not_run"),
        ({8: 30.0, 9: 30.0}, BASE, RATIO, "UNFINISHED", "no_common_seed"),
        (scaled(1.0), BASE, None, "NO_CRITERION", "no_criterion"),
    ]
    for ours, theirs, criterion, verdict, code in cases:
        found = judged(ours, theirs, criterion=criterion)
        assert (found.verdict, codes(found), found.is_look) == (verdict, [code], False), (verdict, code)


def test_without_a_criterion_the_interval_is_still_told() -> None:
    assert judged(scaled(1.0), criterion=None).interval == paired_log_ratio(scaled(1.0), BASE)


def test_seeds_that_change_nothing_prove_nothing() -> None:
    found = judged({seed: 0.5 * ppl for seed, ppl in BASE.items()})
    assert (found.verdict, codes(found)) == ("INCONCLUSIVE", ["no_spread"])


def test_seeds_of_one_arm_only_are_named_and_do_not_count() -> None:
    found = judged({**scaled(0.5, seeds=4), 9: 30.0})
    assert (found.verdict, found.num_seeds) == ("EXPLORATORY", 4)
    assert codes(found) == ["fewer_seeds", "unpaired_seeds"]
    assert found.reasons[1].values == {"ours": (9,), "theirs": (5,)}


def test_a_later_look_uses_a_higher_level_and_says_so() -> None:
    found = judged(scaled(1.0), look=2)
    assert found.level == pytest.approx(0.975, rel=1e-15)
    assert found.interval == paired_log_ratio(scaled(1.0), BASE, level=found.level)
    assert codes(found) == ["interval_inside", "later_look"]
    assert found.reasons[1].values == {"look": 2, "level": found.level}


def test_many_comparisons_use_a_higher_level_and_say_so() -> None:
    found = judged(scaled(1.0), comparisons=8, look=2)
    # 5% shared by eight, halved at the second look.
    assert found.level == pytest.approx(1 - 0.05 / 16, rel=1e-15)
    assert codes(found) == ["interval_inside", "later_look", "many_comparisons"]


def together(*ratios: float) -> list[Judgement]:
    def judge_of(ratio: float) -> Callable[[int], Judgement]:
        return lambda share: judged(scaled(ratio), comparisons=len(ratios), share=share)

    return judge_together([judge_of(ratio) for ratio in ratios])


def test_what_is_sure_leaves_more_room_to_the_rest() -> None:
    # At its own 95% the arm passes, at a third of the error it does not; the two others do either way.
    close = 1.0435
    assert judged(scaled(close)).verdict == "PASS" and judged(scaled(close), comparisons=3).verdict == "INCONCLUSIVE"
    found = together(0.9, close, 1.2)
    assert [one.verdict for one in found] == ["PASS", "PASS", "FAIL"]
    assert [one.level for one in found] == pytest.approx([1 - 0.05 / 3, 0.95, 1 - 0.05 / 3])
    assert [one.comparisons for one in found] == [3, 3, 3]


def test_what_is_not_sure_leaves_none() -> None:
    found = together(1.0435, 1.05, 1.0435)
    assert [one.verdict for one in found] == ["INCONCLUSIVE"] * 3
    assert [one.level for one in found] == pytest.approx([1 - 0.05 / 3] * 3)
    assert together() == []


@given(st.lists(st.sampled_from([0.9, 1.03, 1.04, 1.0435, 1.046, 1.05, 1.054, 1.06, 1.2]), min_size=1, max_size=6))
def test_together_decides_all_that_a_division_by_all_would_and_nothing_that_no_division_would(ratios: list[float]) -> None:
    for ratio, found in zip(ratios, together(*ratios), strict=True):
        alone, strict = judged(scaled(ratio)), judged(scaled(ratio), comparisons=len(ratios))
        assert found.verdict in (alone.verdict, "INCONCLUSIVE")
        assert strict.verdict in (found.verdict, "INCONCLUSIVE")


def test_more_seeds_than_planned_at_a_first_look_are_told() -> None:
    found = judged(scaled(1.0), planned=3)
    assert (found.verdict, codes(found)) == ("PASS", ["interval_inside", "beyond_plan"])


def test_seeds_left_out_after_their_results_were_seen_give_no_verdict() -> None:
    found = judged(scaled(0.5), dropped=(7,))
    assert (found.verdict, codes(found)) == ("EXPLORATORY", ["seeds_dropped"])


def test_a_seed_that_was_lost_since_the_last_look_is_not_told_as_one_that_was_added() -> None:
    found = judged(scaled(0.5), dropped=(7,), look=2, planned=6)
    assert (found.verdict, codes(found)) == ("EXPLORATORY", ["fewer_seeds", "seeds_gone"])


def test_a_folder_without_looks_is_at_its_first(tmp_path: Path) -> None:
    assert Looks.read(tmp_path).look_number(KEY, [1, 2, 3]) == 1
    assert Looks.read(tmp_path / "absent").look_number(KEY, [1, 2, 3]) == 1


def test_repeating_a_report_costs_nothing_and_more_seeds_are_the_next_look(tmp_path: Path) -> None:
    Looks.read(tmp_path).record({KEY: [5, 4, 3, 2, 1]}, date=DAY)
    looks = Looks.read(tmp_path)
    assert [looks.look_number(KEY, seeds) for seeds in ([1, 2, 3, 4, 5], range(1, 9))] == [1, 2]
    looks = looks.record({KEY: range(1, 9)}, date=DAY)
    assert [looks.look_number(KEY, range(1, top)) for top in (6, 9, 12)] == [1, 2, 3]
    assert looks == Looks.read(tmp_path)
    assert looks.look_number(comparison_key("GPT-02", "paper", "default"), range(1, 9)) == 1


def test_a_look_is_recorded_once_with_its_first_date(tmp_path: Path) -> None:
    Looks.read(tmp_path).record({KEY: [1, 2]}, date=DAY)
    before = (tmp_path / "looks.json").stat()
    Looks.read(tmp_path).record({KEY: [2, 1]}, date=DAY + datetime.timedelta(days=9))
    after = (tmp_path / "looks.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    stored = json.loads((tmp_path / "looks.json").read_text())
    assert stored == {"looks": {"GPT-02|laptop|default": [{"seeds": [1, 2], "date": "2025-03-01"}]}}


def test_a_report_that_judges_nothing_writes_nothing(tmp_path: Path) -> None:
    Looks.read(tmp_path).record({}, date=DAY)
    assert not (tmp_path / "looks.json").exists()


def test_two_reports_do_not_forget_each_others_looks(tmp_path: Path) -> None:
    one, other = Looks.read(tmp_path), Looks.read(tmp_path)
    one.record({"a|smoke|default": [1, 2]}, date=DAY)
    other.record({"b|smoke|default": [1, 2]}, date=DAY)
    assert set(Looks.read(tmp_path).entries) == {"a|smoke|default", "b|smoke|default"}


def test_seeds_an_earlier_look_saw_are_missed_unless_it_saw_no_others(tmp_path: Path) -> None:
    looks = Looks.read(tmp_path).record({KEY: [1, 2, 3]}, date=DAY).record({KEY: [1, 2, 3, 4]}, date=DAY)
    assert looks.dropped(KEY, [1, 2, 3, 4, 5]) == ()
    assert looks.dropped(KEY, [1, 2, 3]) == ()
    assert looks.dropped(KEY, [2, 3, 5, 6]) == (1, 4)
    assert looks.dropped("another|smoke|default", [1]) == ()


@settings(max_examples=15)  # every look is a durable write
@given(st.lists(st.sets(st.integers(0, 50), min_size=2, max_size=6), min_size=1, max_size=6, unique_by=frozenset))
def test_looks_survive_their_file(tmp_path_factory: pytest.TempPathFactory, seen: list[set[int]]) -> None:
    folder = tmp_path_factory.mktemp("looks")
    looks = Looks.read(folder)
    for seeds in seen:
        looks = looks.record({KEY: seeds}, date=DAY)
    assert Looks.read(folder) == looks
    assert [looks.look_number(KEY, seeds) for seeds in seen] == list(range(1, len(seen) + 1))


def test_a_damaged_file_is_refused_with_what_to_do_and_left_as_it_is(tmp_path: Path) -> None:
    cases: list[str] = [
        "",
        "{",
        "[]",
        "{}",
        '{"looks": {"a": [{"seeds": [1, 2]}]}}',
        '{"looks": {"a": [{"seeds": [1, 2], "date": "soon"}]}}',
        '{"looks": {"a": [{"seeds": ["1", "2"], "date": "2025-03-01"}]}}',
        '{"looks": {"a": [{"seeds": [2, 1], "date": "2025-03-01"}]}}',
        '{"looks": {"a": [{"seeds": [1], "date": "2025-03-01"}]}}',
        '{"looks": {"a": [{"seeds": [1, 2], "date": "2025-03-01"}, {"seeds": [1, 2], "date": "2025-03-02"}]}}',
        '{"looks": {}, "more": 1}',
    ]
    for text in cases:
        place = Path(mkdtemp(dir=tmp_path))
        path = place / "looks.json"
        whole = Looks.read(place)
        path.write_text(text)
        for attempt in (partial(Looks.read, place), partial(whole.record, {KEY: [1, 2]}, date=DAY)):
            with pytest.raises(DataError) as refusal:
                attempt()
            assert str(path) in str(refusal.value) and "restore it from a copy" in str(refusal.value), text
        assert path.read_text() == text, text


def test_a_folder_that_cannot_hold_looks_is_named(tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("not a folder")
    with pytest.raises(OelmError, match="looks.json: cannot be written"):
        Looks.read(root).record({KEY: [1, 2]}, date=DAY)


@given(st.floats(0.8, 1.3), st.floats(0.001, 0.2))
def test_verdicts_do_not_depend_on_the_unit_of_perplexity(ratio: float, spread: float) -> None:
    ours = {seed: ratio * ppl * math.exp(spread * 100 * (WOBBLE[seed] - 1)) for seed, ppl in BASE.items()}
    plain = judged(ours)
    assume(plain.interval is not None and min(abs(plain.interval.high - 1.05), abs(plain.interval.low - 1.05)) > 1e-9)
    doubled = judged({seed: 2 * ppl for seed, ppl in ours.items()}, {seed: 2 * ppl for seed, ppl in BASE.items()})
    assert doubled.verdict == plain.verdict
