"""Every section's arithmetic, computed once more by hand from the figures that the runs were given."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest

from oelm.bench.speed import TimedShape, TimingRecord, write_timing
from oelm.experiments.importer import write_imported
from oelm.report.document import Chart
from tests.report.by_hand import BASE, LADDER, T, catalog_with, ratio_by_hand, write_by_seed
from tests.report.reading import chart, english, names, rows, section, table, texts, values
from tests.report.recorded_study import reported
from tests.report.synthetic import (
    Fate,
    audit_of,
    write_arm,
    write_plain,
    write_run,
)


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ladder")
    for experiment, figures in LADDER.items():
        write_by_seed(root, experiment, figures)
    return root


def test_the_table_of_verdicts_has_the_gap_computed_by_hand(ladder: Path) -> None:
    found = {row["arm / baseline"]: row for row in rows(english(ladder), "verdicts")}
    assert set(found) == {f"{name} / GPT-01" for name in LADDER if name != "GPT-01"}
    for experiment in ("GPT-02", "GPT-03", "GPT-02-matched"):
        row = found[f"{experiment} / GPT-01"]
        assert row["gap [interval]"] == ratio_by_hand(LADDER[experiment], BASE)
        assert row["best"] == f"{statistics.geometric_mean(LADDER[experiment].values()):.2f}"
        assert (row["seeds / planned"], row["verdict"]) == ("3/5", "exploratory")


def test_the_gap_is_over_common_seeds_alone(tmp_path: Path) -> None:
    write_by_seed(tmp_path, "GPT-01", BASE | {9: 1000.0})
    write_by_seed(tmp_path, "GPT-02", LADDER["GPT-02"] | {8: 1.5})
    (row,) = rows(english(tmp_path), "verdicts")
    assert row["gap [interval]"] == ratio_by_hand(LADDER["GPT-02"], BASE)


def test_every_figure_stands_seed_by_seed(ladder: Path) -> None:
    found = {row["arm"]: row for row in rows(english(ladder), "figures")}
    assert found["GPT-01"]["by seed"] == "0: 30.00, 1: 30.30, 2: 29.80" and found["GPT-01"]["mean"] == "30.03"
    assert set(found) == set(LADDER)


def test_the_forest_shows_the_same_intervals_as_the_table(ladder: Path) -> None:
    document = english(ladder)
    shown = {row["name"]: row for row in values(document, "classes")}
    logs = [math.log(LADDER["GPT-02"][seed] / BASE[seed]) for seed in BASE]
    assert shown["oelm_freeze (pure)"]["value"] == pytest.approx(math.exp(statistics.fmean(logs)), rel=1e-9)
    assert shown["oelm_freeze (pure)"]["text"] == ratio_by_hand(LADDER["GPT-02"], BASE)
    assert shown["oelm_freeze (pure)"]["low"] < shown["oelm_freeze (pure)"]["value"] < shown["oelm_freeze (pure)"]["high"]
    assert len(shown) == 4


def test_each_target_has_a_forest_of_its_own(tmp_path: Path) -> None:
    strict = (
        "STRICT: {kind: language_model, data: x, method: oelm_freeze, baseline: BASE, criterion: {ppl_ratio_at_most: 1.01}}"
    )
    entries = ("BASE: {kind: language_model, data: x}", strict)
    for experiment in ("GPT-01", "GPT-02", "BASE", "STRICT"):
        write_by_seed(tmp_path, experiment, LADDER.get(experiment, {0: 30.0, 1: 30.4, 2: 30.1}))
    document = english(tmp_path, catalog=catalog_with(*entries))
    names_by_chart = {name: [row["name"] for row in values(document, name)] for name in ("classes", "classes-1.01")}
    assert names_by_chart == {"classes": ["oelm_freeze (pure)"], "classes-1.01": ["STRICT (control)"]}
    assert "the target 1.01." in chart(document, "classes-1.01").caption
    layers = chart(document, "classes-1.01").spec["layer"]
    drawn = [layer["data"]["values"][0]["place"] for layer in layers if "data" in layer and layer["mark"]["type"] == "rule"]
    assert drawn == [1.0, 1.01]


def write_curves(root: Path) -> None:
    """Two seeds of a baseline and of an arm; of the arm, one never reaches what both reach on the mean, a loss of 2."""
    for seed in (0, 1):
        write_run(root, "GPT-01", seed, Fate(ppl=math.e, losses=(4.0, 3.0, 2.0, 1.0), step_s=0.5, overhead_s=10.0))
    arms = {0: (3.0, 1.9, 1.875, 1.75), 1: (4.0, 3.5, 3.0, 2.25)}
    for seed, losses in arms.items():
        fate = Fate(ppl=math.exp(losses[-1]), losses=losses, step_s=1.0, overhead_s=20.0, method="oelm_freeze")
        write_run(root, "GPT-02", seed, fate)


def test_learning_curves_are_means_with_bands_over_seeds(tmp_path: Path) -> None:
    write_curves(tmp_path)
    shown = [row for row in values(english(tmp_path), "learning-0") if row["arm"] == "GPT-02"]
    assert [row["step"] for row in shown] == [5, 10, 15, 20]
    # Seeds differ in the last digits of their worst loss, by 1e-12.
    for row, by_hand in zip(shown, [(3.5, 3.0, 4.0), (2.7, 1.9, 3.5), (2.4375, 1.875, 3.0), (2.0, 1.75, 2.25)], strict=True):
        assert (row["mean"], row["low"], row["high"]) == pytest.approx(by_hand, abs=1e-11) and row["seeds"] == 2


def test_a_step_that_one_seed_lacks_is_not_in_the_curve(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [3.0, 3.0], seeds=[0, 1])
    write_run(tmp_path, "GPT-02", 0, Fate(ppl=math.exp(2.0), losses=(4.0, 3.0, 2.5, 2.0), method="oelm_freeze"))
    write_run(tmp_path, "GPT-02", 1, Fate(ppl=math.exp(2.0), losses=(3.0, 2.0), method="oelm_freeze"))
    shown = [row["step"] for row in values(english(tmp_path), "learning-0") if row["arm"] == "GPT-02"]
    assert shown == [10, 20]


def test_of_many_families_the_plain_ones_are_drawn_and_the_rest_are_counted(tmp_path: Path) -> None:
    for number in range(9):
        for experiment in ("GPT-01", "GPT-02"):
            write_arm(tmp_path, experiment, [30.0, 30.5], seeds=[0, 1], variant=f"dropout-{number}", entropies=None)
    for experiment in ("GPT-04", "GPT-05"):
        write_arm(tmp_path, experiment, [30.0, 30.5], seeds=[0, 1], budget="smoke", entropies=None)
        write_arm(tmp_path, experiment, [30.0, 30.5], seeds=[0, 1], entropies=None)
    document = english(tmp_path)
    charts = [block for block in section(document, "learning").blocks if isinstance(block, Chart)]
    assert len(charts) == 8 and charts[0].alt == "Validation loss against steps for GPT-04, GPT-05."
    (note,) = texts(document, "learning", "note")
    assert note == "3 more families are not drawn; name experiments or a budget to see theirs."
    assert "why" not in names(document)
    # Tables leave nobody out.
    assert len(rows(document, "verdicts")) == 11 and len(rows(document, "costs")) == 22


def test_costs_computed_by_hand(tmp_path: Path) -> None:
    for seed, step_s in enumerate((0.040, 0.050, 0.090)):
        write_run(tmp_path, "GPT-01", seed, Fate(ppl=30.0 + seed, step_s=step_s))
        write_run(tmp_path, "GPT-02", seed, Fate(ppl=31.0 + seed, step_s=0.9 * step_s, method="oelm_freeze"))
    baseline, arm = rows(english(tmp_path), "costs")
    counted = audit_of("oelm_freeze")
    total, frozen = counted["total"], 2 * 2 * 64 * 64
    assert (baseline["frozen"], baseline["share frozen"]) == ("0", "0.00%")
    assert (arm["trainable"], arm["frozen"]) == (f"{total - frozen:,}", f"{frozen:,}")
    assert arm["share frozen"] == f"{100 * frozen / total:.2f}%"
    # Two moments of four bytes for what trains; four bytes for every weight.
    assert arm["optimizer state"] == f"{8 * (total - frozen) / 2**20:,.1f} MiB"
    assert arm["checkpoint"] == f"{(4 * total + 8 * (total - frozen)) / 2**20:,.1f} MiB"
    assert (baseline["median step"], arm["median step"]) == ("50.0 ms", "45.0 ms")


def test_timings_in_turns_stand_beside_the_bound(tmp_path: Path) -> None:
    write_curves(tmp_path)
    assert any("No interleaved timing" in text for text in texts(english(tmp_path), "costs", "note"))
    timing = TimingRecord(
        first="baseline",
        second="oelm_freeze",
        shape=TimedShape(num_layers=6, model_dim=512, seq_len=512, batch_size=8, dropout=0.1),
        value=1.0125,
        low=0.9875,
        high=1.0375,
        bound=1.0235,
        rounds=12,
        first_step_s=10.0,
        second_step_s=9.9,
        first_peak_bytes=3000 * 2**20,
        second_peak_bytes=2900 * 2**20,
    )
    write_timing(tmp_path, timing)
    (row,) = rows(english(tmp_path), "speed")
    assert row["first / second"] == "baseline / oelm_freeze"
    # 1.0125 and 1.0375 are not binary fractions of three digits: what is printed is what Python rounds them to.
    assert row["speed of the second [95%]"] == f"{1.0125:.3f}x [{0.9875:.3f}, {1.0375:.3f}]"
    assert (row["bound"], row["peak memory"], row["rounds"]) == (f"{1.0235:.3f}x", "3,000 / 2,900 MiB", "12")
    assert 4 in table(english(tmp_path), "speed").shown
    write_timing(tmp_path, timing.model_copy(update={"first_peak_bytes": None, "second_peak_bytes": None}))
    assert 4 not in table(english(tmp_path), "speed").shown, "a column without a figure is left out"


def test_what_heads_do_is_shown_as_means_over_heads_and_seeds(tmp_path: Path) -> None:
    write_arm(tmp_path, "GPT-01", [30.0, 30.5], seeds=[0, 1])
    for seed, entropies in enumerate((((1.0, 2.0), (0.5, 1.0)), ((2.0, 3.0), (0.25, 0.75)))):
        write_run(tmp_path, "GPT-02", seed, Fate(ppl=31.0 + seed, method="oelm_freeze", entropies=entropies))
    found = {row["what the heads do"]: row for row in rows(english(tmp_path), "heads") if row["arm"] == "GPT-02"}
    # Layer 0: seeds at (1 + 2) / 2 and (2 + 3) / 2. Layer 1: 0.75 and 0.5.
    scales = {
        "entropy of attention (nats)": 1.0,
        "standard deviation of the logits": 1 / 4,
        "mean distance looked back (tokens)": 2.0,
        "effective rank of Q K^T": 10.0,
        "induction score": 1 / 16,
    }
    for measure, scale in scales.items():
        assert [found[measure][f"layer {layer}"] for layer in (0, 1)] == [f"{2.0 * scale:.2f}", f"{0.625 * scale:.2f}"]
        assert found[measure]["seeds"] == "2"


def test_arms_whose_heads_were_not_measured_have_no_such_table(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        write_arm(tmp_path, experiment, [30.0, 30.5], seeds=[0, 1], entropies=None)
    assert "why" not in names(english(tmp_path))


def test_classifiers_have_an_interval_over_examples(tmp_path: Path) -> None:
    # Of eight examples the arm misses one that the baseline has, at both seeds, and one more at one seed.
    baseline = (True,) * 6 + (False,) * 2
    arms = [(True,) * 5 + (False,) * 3, (True,) * 4 + (False,) * 4]
    for seed in (0, 1):
        write_run(tmp_path, "SST-2-01", seed, Fate(accuracy=0.9, right=baseline, entropies=None))
        fate = Fate(accuracy=0.875 + seed / 100, right=arms[seed], entropies=None, method="oelm_freeze_pretrained")
        write_run(tmp_path, "SST-2-02", seed, fate)
    (row,) = rows(english(tmp_path), "verdicts")
    differences = [0.0] * 4 + [-0.5, -1.0] + [0.0] * 2
    half = 2.36462 * statistics.stdev(differences) / math.sqrt(8)
    low, high = (100 * (statistics.fmean(differences) + end) for end in (-half, half))
    assert row["sensitivity [95%]"] == f"{100 * statistics.fmean(differences):+.2f} [{low:+.2f}, {high:+.2f}]"
    gaps = [0.875 - 0.9, 0.885 - 0.9]
    half = T[1] * statistics.stdev(gaps) / math.sqrt(2)
    low, high = (100 * (statistics.fmean(gaps) + end) for end in (-half, half))
    assert row["gap [interval]"] == f"{100 * statistics.fmean(gaps):+.2f} [{low:+.2f}, {high:+.2f}]"
    assert row["best"] == "88.00%"
    (note,) = [text for text in texts(english(tmp_path), "verdicts") if text.startswith("SST-2-02, laptop")]
    told = re.search(r"detect with 80% probability: ([0-9.]+) points over seeds, ([0-9.]+) points over examples\.", note)
    assert told is not None
    # The shifts at which a noncentral t of 1 and of 7 degrees exceeds 12.706 and 2.3646 with a probability of 0.8.
    for points, shift, paired in ((told[1], 16.334, gaps), (told[2], 3.2698, differences)):
        assert float(points) == pytest.approx(100 * shift * statistics.stdev(paired) / math.sqrt(len(paired)), abs=0.01)


@pytest.mark.parametrize("cut", ["other-examples", "missing"])
def test_predictions_that_cannot_be_paired_give_no_interval_over_examples(tmp_path: Path, cut: str) -> None:
    for experiment in ("SST-2-01", "SST-2-02"):
        write_arm(tmp_path, experiment, [0.9, 0.88], seeds=[0, 1])
    path = tmp_path / "SST-2-02" / "laptop" / "default" / "seed-1" / "predictions.jsonl"
    if cut == "missing":
        path.unlink()
    else:
        path.write_text(path.read_text(encoding="utf-8").replace('"example": 0,', '"example": 1000,'), encoding="utf-8")
    (row,) = rows(english(tmp_path), "verdicts")
    assert row["sensitivity [95%]"] == "" and "[" in row["gap [interval]"]


@pytest.mark.parametrize("is_measured", [True, False])
def test_accuracies_stand_beside_the_share_of_the_largest_class(tmp_path: Path, is_measured: bool) -> None:
    right = tuple(number < 7 for number in range(9))
    for run in write_arm(tmp_path, "SST-2-01", [0.9, 0.88], seeds=[0, 1], tests=[0.8, 0.8], right=right):
        # Of nine labels, 0 and 1 in turn, five are 0. On test all are.
        shares = {"majority_accuracy": 5 / 9, "test_majority_accuracy": 1.0} if is_measured else {}
        figures = json.loads((run / "timing_stats.json").read_text(encoding="utf-8"))
        write_plain(run / "timing_stats.json", figures | shares)
    (row,) = rows(english(tmp_path), "figures")
    assert (row["largest class"], row["largest class on test"]) == ("55.56%", "100.00%")
    write_by_seed(tmp_path, "GPT-01", BASE)
    found = {row["arm"]: row["largest class"] for row in rows(english(tmp_path), "figures")}
    assert found == {"GPT-01": "", "SST-2-01": "55.56%"}


def test_perplexities_have_no_largest_class(tmp_path: Path) -> None:
    write_by_seed(tmp_path, "GPT-01", BASE)
    (row,) = rows(english(tmp_path), "figures")
    assert list(row) == ["arm", "budget", "mean", "by seed"]


def test_reported_values_stand_beside_what_was_measured(tmp_path: Path) -> None:
    write_by_seed(tmp_path, "GPT-01", BASE)
    write_by_seed(tmp_path, "GPT-02", LADDER["GPT-02"])
    write_by_seed(tmp_path, "GPT-01", {0: 999.0}, budget="smoke")
    found = {row["experiment"]: row for row in rows(english(tmp_path), "reported")}
    assert (found["GPT-01"]["reported"], found["GPT-01"]["reported gap"]) == ("4.27", "")
    assert (found["GPT-02"]["reported"], found["GPT-02"]["reported gap"]) == ("4.69", "+9.8%")
    assert found["GPT-01"]["measured"] == "30.03 (laptop, n=3)"
    assert found["GPT-02"]["measured gap [95%]"] == f"{ratio_by_hand(LADDER['GPT-02'], BASE)} (laptop, n=3)"
    assert found["GPT-03"]["measured"] == "not measured" and found["GPT-03"]["measured gap [95%]"] == ""


# FACTS.md, sections 2 and 3: what the study itself printed beside its figures.
PRINTED = {
    "GPT-02": "+9.8%",
    "GPT-03": "+16.4%",
    "GPT-05": "+14.9%",
    "GPT-07": "+15.5%",
    "XNLI-02": "+1.08",
    "SST-2-02": "-1.84",
}


def test_reported_gaps_follow_from_the_reported_figures(tmp_path: Path) -> None:
    write_by_seed(tmp_path, "GPT-01", BASE)
    found = {row["experiment"]: row for row in rows(english(tmp_path), "reported")}
    for experiment, gap in PRINTED.items():
        assert found[experiment]["reported gap"] == gap, experiment
    assert len(found) == 14


def test_what_was_imported_of_the_earlier_study_is_among_others_runs(tmp_path: Path) -> None:
    write_imported([reported("GPT-01", 4.27, ((10, 1.5), (20, 1.45)))], tmp_path)
    (row,) = rows(english(tmp_path), "imported")
    assert (row["study"], row["arm"], row["last step"], row["metrics"]) == ("old", "GPT-01", "20", "best_ppl, val_loss")


def test_a_users_own_reported_figures_of_another_kind_are_shown_as_they_are(tmp_path: Path) -> None:
    own = "OWN: {kind: language_model, data: stdlib, reported: {source: mine, figures: {final_loss: 0.5, hours: 3}}}"
    other = "OTHER: {extends: OWN, baseline: OWN, reported: {source: mine, figures: {best_ppl: 4}}}"
    write_by_seed(tmp_path, "GPT-01", BASE)
    found = rows(english(tmp_path, catalog=catalog_with(own, other)), "reported")[-2:]
    assert [(row["reported"], row["reported gap"]) for row in found] == [("final_loss 0.5, hours 3", ""), ("4", "")]


def test_charts_tell_in_words_what_they_show(ladder: Path) -> None:
    document = english(ladder)
    assert all(experiment in chart(document, "learning-0").alt for experiment in LADDER)
    assert section(document, "verdicts").blocks


def test_language_models_have_an_interval_over_documents_where_all_kept_the_same_ones(tmp_path: Path) -> None:
    base, arm = ([20.0, 20.5, 19.8], [21.0, 21.6, 20.7])
    written = [*write_arm(tmp_path, "GPT-01", base, seeds=range(3)), *write_arm(tmp_path, "GPT-02", arm, seeds=range(3))]
    found = rows(english(tmp_path), "verdicts")[0]["sensitivity [95%]"]
    assert "; over documents +" in found
    lines = (written[-1] / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    (written[-1] / "predictions.jsonl").unlink()
    assert len(lines) > 1 and "documents" not in rows(english(tmp_path), "verdicts")[0]["sensitivity [95%]"]


def test_the_same_method_across_data_sets(tmp_path: Path) -> None:
    first, second = LADDER["GPT-02"], {0: 52.0, 1: 53.0, 2: 51.0}
    write_by_seed(tmp_path, "GPT-01", BASE)
    write_by_seed(tmp_path, "GPT-02", first)
    write_by_seed(tmp_path, "GPT-04", {0: 50.0, 1: 50.5, 2: 49.5}, data="openwebtext")
    write_by_seed(tmp_path, "GPT-05", second, data="openwebtext")
    (row,) = rows(english(tmp_path), "classes")
    assert row["method"] == "oelm_freeze"
    assert row["tinystories"] == ratio_by_hand(first, BASE)
    assert row["openwebtext"] == ratio_by_hand(second, {0: 50.0, 1: 50.5, 2: 49.5})


def test_a_control_has_one_row_across_data_sets(tmp_path: Path) -> None:
    thin = {0: 31.5, 1: 31.9, 2: 31.4}
    for baseline, data in (("GPT-01", "tinystories"), ("GPT-04", "openwebtext")):
        write_by_seed(tmp_path, baseline, BASE, data=data)
        write_by_seed(tmp_path, f"{baseline}-thin", thin, data=data, settings={"model.qk_dim": 4})
    gap = ratio_by_hand(thin, BASE)
    (row,) = rows(english(tmp_path), "classes")
    assert (row["method"], row["openwebtext"], row["tinystories"]) == ("thin", gap, gap)
