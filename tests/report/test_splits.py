"""Models are chosen on validation and told of on test: where every run has test figures, and never a mix."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import DataError
from oelm.files import read_json
from oelm.report.arms import collect, common_split, load_runs
from oelm.report.compare import compare_runs
from oelm.report.document import Document
from oelm.report.sections.baselines import MOST_OF_FIVE_GRAM
from oelm.runs.records import Counters, TextCounter
from tests.report.by_hand import BASE, LADDER, ratio_by_hand
from tests.report.reading import english, everything, rows, table, texts, values
from tests.report.synthetic import Fate, package_catalog, write_arm, write_plain, write_run
from tests.runs.recomputed import figure_problems, read_record

ARM = LADDER["GPT-02"]
# Another order of gaps than on validation, so that a mix would show.
BASE_TEST, ARM_TEST = {0: 33.0, 1: 32.0, 2: 34.0}, {0: 37.0, 1: 36.5, 2: 37.5}


def write(root: Path, experiment: str, figures: dict[int, float], tests: dict[int, float | None] | None = None) -> None:
    write_arm(root, experiment, list(figures.values()), seeds=list(figures), tests=list((tests or {}).values()))


def write_tested(root: Path) -> Path:
    write(root, "GPT-01", BASE, dict(BASE_TEST))
    write(root, "GPT-02", ARM, dict(ARM_TEST))
    return root


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study whose runs all have test figures, to be read only."""
    return write_tested(tmp_path_factory.mktemp("tested"))


def verdict_row(document: Document, arm: str = "GPT-02") -> dict[str, str]:
    (row,) = [row for row in rows(document, "verdicts") if row["arm / baseline"].startswith(f"{arm} /")]
    return row


@pytest.mark.parametrize("figure", [31.4, 0.88], ids=["language-model", "classifier"])
def test_synthetic_runs_with_a_test_split_are_what_training_leaves(tmp_path: Path, figure: float) -> None:
    (run,) = write_arm(tmp_path, "GPT-02", [figure], seeds=[3], tests=[1.1 * figure])
    assert figure_problems(read_record(run)) == []


def test_where_every_run_has_test_figures_gap_and_verdict_are_on_test(tested: Path) -> None:
    document = english(tested)
    row = verdict_row(document)
    assert row["gap [interval]"] == ratio_by_hand(ARM_TEST, BASE_TEST) != ratio_by_hand(ARM, BASE)
    assert row["best"] == f"{statistics.geometric_mean(ARM_TEST.values()):.2f}" and row["on"] == "test"
    assert "All on the test split" in texts(document, "verdicts")[0]
    assert any("laptop: On test." in note for note in texts(document, "verdicts", "note"))
    (point,) = values(document, "classes")
    assert point["text"] == row["gap [interval]"]


def test_without_test_figures_everything_is_on_validation_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, "GPT-01", BASE)
    write(tmp_path, "GPT-02", ARM)
    document = english(tmp_path)
    row = verdict_row(document)
    assert (row["gap [interval]"], row["on"]) == (ratio_by_hand(ARM, BASE), "validation")
    assert "All on validation." in texts(document, "verdicts")[0] and "(test)" not in everything(document)
    assert table(document, "figures").columns == ("arm", "budget", "mean", "by seed")


@pytest.mark.parametrize("lacking", ["arm", "baseline", "one seed"])
def test_a_comparison_in_which_one_run_lacks_test_figures_is_on_validation_whole(tmp_path: Path, lacking: str) -> None:
    partial = {**ARM_TEST, 2: None} if lacking == "one seed" else None if lacking == "arm" else dict(ARM_TEST)
    write(tmp_path, "GPT-01", BASE, None if lacking == "baseline" else dict(BASE_TEST))
    write(tmp_path, "GPT-02", ARM, partial)  # type: ignore[arg-type]
    document = english(tmp_path)
    row = verdict_row(document)
    assert (row["gap [interval]"], row["on"]) == (ratio_by_hand(ARM, BASE), "validation")
    assert row["best"] == f"{statistics.geometric_mean(ARM.values()):.2f}"
    count = {"arm": 3, "baseline": 3, "one seed": 5}[lacking]
    assert any(f"only {count} of their 6 runs have test figures" in text for text in texts(document, "verdicts", "warning"))


def test_arms_of_one_table_may_stand_on_different_splits_each_told(tmp_path: Path) -> None:
    write_tested(tmp_path)
    write(tmp_path, "GPT-03", LADDER["GPT-03"])
    document = english(tmp_path)
    assert (verdict_row(document)["on"], verdict_row(document, "GPT-03")["on"]) == ("test", "validation")
    assert verdict_row(document)["gap [interval]"] == ratio_by_hand(ARM_TEST, BASE_TEST)
    assert verdict_row(document, "GPT-03")["gap [interval]"] == ratio_by_hand(LADDER["GPT-03"], BASE)
    assert "best on validation: 1; on validation, because test figures are missing: 1" in texts(document, "verdicts")[0]
    # Pooled over those on test alone, which is the arm itself: the same as unpooled.
    pooled = verdict_row(document)["sensitivity [95%]"].split("; over documents")[0]
    assert pooled == verdict_row(document)["gap [interval]"]


def test_figures_of_both_splits_stand_seed_by_seed(tested: Path) -> None:
    found = {row["arm"]: row for row in rows(english(tested), "figures")}
    assert found["GPT-01"]["by seed"] == "0: 30.00, 1: 30.30, 2: 29.80"
    assert found["GPT-01"]["on test, by seed"] == "0: 33.00, 1: 32.00, 2: 34.00"
    assert found["GPT-01"]["mean on test"] == f"{statistics.geometric_mean(BASE_TEST.values()):.2f}"


def test_what_was_reported_on_validation_is_set_beside_validation(tested: Path) -> None:
    found = {row["experiment"]: row for row in rows(english(tested), "reported")}
    assert ratio_by_hand(ARM, BASE) in found["GPT-02"]["measured gap [95%]"]
    assert found["GPT-02"]["measured"].startswith(f"{statistics.geometric_mean(ARM.values()):.2f}")


def test_curves_stay_on_validation(tested: Path, tmp_path: Path) -> None:
    write(tmp_path, "GPT-01", BASE)
    write(tmp_path, "GPT-02", ARM)
    one, other = english(tested), english(tmp_path)
    assert values(one, "learning-0") == values(other, "learning-0")


def test_a_classifiers_examples_on_test_are_those_that_its_gap_is_of(tmp_path: Path) -> None:
    right, fewer = (True,) * 9 + (False,), (True,) * 7 + (False,) * 3
    for experiment, answers in (("XNLI-01", right), ("XNLI-02", fewer)):
        for seed in (0, 1):
            accuracy = sum(answers) / 10
            fate = Fate(accuracy=0.5, test=accuracy, test_right=answers, entropies=None, data="xnli-en")
            write_run(tmp_path, experiment, seed, fate)
    row = verdict_row(english(tmp_path), "XNLI-02")
    assert row["gap [interval]"].startswith("-20.00") and row["sensitivity [95%]"].startswith("-20.00") and row["on"] == "test"


def test_rows_for_a_notebook_have_both(tested: Path) -> None:
    found = [row for row in load_runs(tested) if row["experiment"] == "GPT-01"]
    assert [row["test_ppl"] for row in found] == pytest.approx(list(BASE_TEST.values()))
    assert all(row["test_step"] == row["best_step"] and row["test_loss"] is not None for row in found)


def test_runs_side_by_side_are_all_on_test_or_none(tmp_path: Path) -> None:
    write_tested(tmp_path)
    write(tmp_path, "GPT-03", LADDER["GPT-03"])
    base, arm, third = (tmp_path / name / "laptop" / "default" for name in ("GPT-01", "GPT-02", "GPT-03"))
    both, remarks = compare_runs([base, arm])
    assert both.columns[2] == "PPL on test" and both.rows[1][3].text == ratio_by_hand(ARM_TEST, BASE_TEST)
    assert not any("on validation" in remark for remark in remarks)
    three, remarks = compare_runs([base, arm, third])
    assert three.columns[2] == "best PPL on validation" and three.rows[1][3].text == ratio_by_hand(ARM, BASE)
    assert remarks[0] == f"compared on validation, because not every run of {third} has figures on test"


def test_a_run_whose_test_figures_cannot_be_is_not_used(tmp_path: Path) -> None:
    (run,) = write_arm(tmp_path, "GPT-01", [30.0], seeds=[0], tests=[33.0], bigram=60.0)
    whole = json.loads((run / "timing_stats.json").read_text())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"test_ppl": 0.5}, "no perplexity"),
        ({"test_ppl": 40.0}, "gives another"),
        ({"test_loss": None}, "expected test_step, test_loss"),
        ({"test_step": 5}, "the best on validation was 20"),
        ({"bigram_ppl": 0.2}, "no perplexity"),
        ({"ngram": {"val": [50.0, 40.0, 30.0, 20.0]}}, "no perplexities of order 1 to 5"),
        ({"ngram": {"val": [50.0, 40.0, 30.0, 20.0, 0.9]}}, "no perplexities of order 1 to 5"),
    ]
    for change, told in cases:
        stats = {key: value for key, value in (whole | change).items() if value is not None}
        write_plain(run / "timing_stats.json", stats)
        (arm,) = collect([tmp_path])
        assert not arm.is_usable and told in arm.unfinished[0].problem, change
        assert any(told in problem for problem in figure_problems(read_record(run))), change


def test_the_split_of_arms_is_test_only_where_all_have_it(tmp_path: Path) -> None:
    write_tested(tmp_path)
    write(tmp_path, "GPT-03", LADDER["GPT-03"])
    first, second, third = collect([tmp_path])
    assert (common_split(first, second), common_split(first, third), common_split(third)) == ("test", "val", "val")


def write_baseline(
    root: Path,
    *,
    ppls: tuple[float, float] = (30.0, 30.0),
    bigram: float | None = None,
    five_gram: float | None = None,
    budget: str = "laptop",
    last: float = 1.0,
) -> Document:
    for experiment in ("GPT-01", "GPT-02"):
        for seed, ppl in enumerate(ppls):
            loss = math.log(ppl)
            losses = (loss + 1, loss, loss + 0.1, last * loss)
            write_arm(root, experiment, [ppl], seeds=[seed], bigram=bigram, five_gram=five_gram, losses=losses, budget=budget)
    return english(root, catalog=package_catalog())


def warned(document: Document, words: str) -> list[str]:
    return [text for text in texts(document, "verdicts", "warning") if words in text]


def test_a_baseline_is_next_to_the_5_gram_of_its_text(tmp_path: Path) -> None:
    document = write_baseline(tmp_path, five_gram=32.0)
    (row,) = rows(document, "baselines")
    assert (row["baseline"], row["PPL"], row["counter"]) == ("GPT-01", "30.00", "5-gram")
    assert (row["counter PPL"], row["PPL / counter PPL"]) == ("32.00", "0.938")
    assert row["n-gram PPL, order 1 to 5"] == "512.00 / 256.00 / 128.00 / 64.00 / 32.00"
    assert row["final loss above its minimum"] == "0.00%" and row["on"] == "validation"
    assert not warned(document, "counting") and not warned(document, "overfitted") and not warned(document, "bigram")


def test_the_page_gives_the_rule_for_a_real_baseline_that_verdicts_follow(tmp_path: Path) -> None:
    document = write_baseline(tmp_path, five_gram=32.0)
    (rule,) = [text for text in texts(document, "baselines") if "A baseline is a real one" in text]
    assert f"when every seed has at most {MOST_OF_FIVE_GRAM:g} times the perplexity of that" in rule


def test_a_baseline_of_which_one_seed_does_not_beat_the_5_gram_is_reported(tmp_path: Path) -> None:
    document = write_baseline(tmp_path, ppls=(30.0, 33.0), five_gram=32.0)
    assert rows(document, "baselines")[0]["PPL / counter PPL"] == "0.983"
    (told,) = warned(document, "does not clearly beat counting")
    assert told.startswith("GPT-01, laptop: its worst seed has 1.031 times the perplexity of a 5-gram model")


def record_best(root: Path, bits: float) -> None:
    (fingerprint,) = {read_json(path)["data"]["fingerprint"] for path in root.glob("*/*/*/*/manifest.json")}
    counters = Counters().with_text(fingerprint, {"val": TextCounter(vocabulary=2048, order=8, bits_per_byte=bits)})
    write_plain(root / "counters.json", counters.model_dump(mode="json"))


def test_the_best_counter_is_shown_in_bits_per_byte_once_it_is_recorded(tmp_path: Path) -> None:
    before = table(write_baseline(tmp_path, five_gram=32.0), "baselines")
    assert "best counter" not in [before.columns[place] for place in before.shown]
    # The runs of these tests have half of their loss as bits per byte.
    record_best(tmp_path, math.log(30.0) / 2 + 0.1)
    document = english(tmp_path, catalog=package_catalog())
    (row,) = rows(document, "baselines")
    assert (row["bits per byte"], row["best counter"]) == ("1.701", "1.801 (order 8, vocabulary 2,048)")
    assert not warned(document, "counting")


def test_a_baseline_that_loses_to_the_best_counter_is_reported(tmp_path: Path) -> None:
    write_baseline(tmp_path, five_gram=32.0)
    record_best(tmp_path, math.log(30.0) / 2 - 0.1)
    (told,) = warned(english(tmp_path, catalog=package_catalog()), "counting is better")
    assert told.startswith("GPT-01, laptop: it needs 1.701 bits per byte")
    assert "1.601 (order 8, vocabulary 2,048)" in told


def test_counters_that_cannot_be_read_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    write_baseline(tmp_path)
    (tmp_path / "counters.json").write_text('{"format": "oelm-counters-1", "best": {"x": {"val": {"order": 0}}}}')
    with pytest.raises(DataError, match=r"counters\.json: best\.x\.val.*: oelm data info NAME --counters"):
        english(tmp_path, catalog=package_catalog())


def test_a_baseline_on_test_is_next_to_the_5_gram_on_test(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        (run,) = write_arm(tmp_path, experiment, [30.0], seeds=[0], tests=[33.0], five_gram=40.0)
        stats = json.loads((run / "timing_stats.json").read_text())
        stats["ngram"]["test"][4] = 32.0
        write_plain(run / "timing_stats.json", stats)
    document = english(tmp_path, catalog=package_catalog())
    (row,) = rows(document, "baselines")
    assert (row["on"], row["counter PPL"]) == ("test", "32.00") and warned(document, "does not clearly beat counting")


def test_a_record_of_before_the_5_gram_is_labelled_and_keeps_its_bigram(tmp_path: Path) -> None:
    document = write_baseline(tmp_path, bigram=120.0)
    (row,) = rows(document, "baselines")
    assert (row["counter"], row["counter PPL"], row["PPL / counter PPL"]) == ("bigram", "120.00", "0.250")
    assert row["n-gram PPL, order 1 to 5"] == ""
    (told,) = warned(document, "bigram")
    assert told.startswith("Recorded before the 5-gram was measured: compared with a bigram only, without a verdict")
    assert told.endswith(": GPT-01, laptop.") and told in texts(document, "baselines", "note")


def test_a_baseline_that_learnt_too_long_is_reported(tmp_path: Path) -> None:
    document = write_baseline(tmp_path, five_gram=120.0, last=1.02)
    (row,) = rows(document, "baselines")
    assert row["final loss above its minimum"] == "2.00%"
    (told,) = warned(document, "overfitted")
    assert "2.0% above its minimum" in told


def test_smoke_is_never_called_a_bad_baseline(tmp_path: Path) -> None:
    for bigram, five_gram in ((31.0, None), (None, 29.0)):
        document = write_baseline(tmp_path, bigram=bigram, five_gram=five_gram, budget="smoke", last=1.5)
        bad = ("real baseline", "counting", "overfitted", "bigram")
        assert not any(warned(document, words) for words in bad)


def test_runs_recorded_before_anything_was_counted_have_none_in_the_table(tmp_path: Path) -> None:
    (row,) = rows(write_baseline(tmp_path), "baselines")
    assert (row["counter"], row["counter PPL"], row["PPL / counter PPL"]) == ("", "", "")
