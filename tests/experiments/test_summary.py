"""What a queue came to: arms behind their baselines, paired by seed, and no word about seeds that one of them lacks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from oelm.experiments.catalog import Catalog
from oelm.experiments.plan import PlannedRun, plan_runs
from oelm.experiments.summary import split_note, summarize
from oelm.stats import paired_gap
from oelm.text import figure_text
from tests.cases import case
from tests.experiments.planned import PAIR, catalog_of, finish
from tests.experiments.recorded import record

# The arm stands before its baseline, as in the docs.
CATALOG = catalog_of(
    PAIR, "early: {extends: arm, baseline: early-base, settings: {optim.lr: 0.5}}\nearly-base: {extends: base}"
)
BERT = catalog_of(
    "bert: {kind: classifier, data: sst2}\n"
    "bert-arm: {extends: bert, baseline: bert, method: oelm_freeze, criterion: {accuracy_loss_at_most: 0.05}}"
)


def runs_of(catalog: Catalog, root: Path, seeds: list[int], *names: str) -> dict[tuple[str, int], PlannedRun]:
    runs = plan_runs(catalog.select(names), budget="smoke", seeds=seeds, root=root)
    return {(run.experiment.id, run.seed): run for run in runs}


def test_nothing_finished_is_no_row(tmp_path: Path) -> None:
    runs = runs_of(CATALOG, tmp_path, [0], "base", "arm")
    for said in ("running", "failed"):
        record(tmp_path, said, experiment="base", best=3.0, metric="ppl")
        assert summarize(list(runs.values())) == []


def test_a_gap_is_the_geometric_mean_of_ratios_of_the_same_seed(tmp_path: Path) -> None:
    runs = runs_of(CATALOG, tmp_path, [0, 1, 2, 3], "base", "arm")
    for name, figures in {"base": {0: 4.0, 1: 5.0, 3: 0.1}, "arm": {0: 4.4, 1: 6.0, 2: 99.0}}.items():
        for seed, best in figures.items():
            finish(runs[name, seed], best)
    base, arm = summarize(list(runs.values()))
    assert (base.experiment.id, base.best, base.gap.text) == ("base", {0: 4.0, 1: 5.0, 3: 0.1}, "")
    assert base.mean == pytest.approx(2 ** (1 / 3))
    # Seeds that only one of them has count among its figures and not in the comparison.
    assert arm.best == {0: 4.4, 1: 6.0, 2: 99.0}
    assert arm.gap.interval is not None and arm.gap.interval.freedom == 1
    assert arm.gap.value == pytest.approx(math.sqrt(1.1 * 1.2))
    assert arm.gap.interval.low < 1.1 and arm.gap.interval.high > 1.2


def test_a_family_stands_on_test_only_where_every_finished_run_of_it_does(tmp_path: Path) -> None:
    runs = runs_of(CATALOG, tmp_path, [0, 1], "base", "arm", "early", "early-base")
    tests = {"base": 5.0, "arm": 6.0, "early-base": 5.5}
    for (name, seed), run in runs.items():
        finish(run, 4.0, test=None if name == "early" and seed == 1 else tests.get(name, 7.0))
    rows = {row.experiment.id: row for row in summarize(list(runs.values()))}
    assert {name: row.split for name, row in rows.items()} == {
        "base": "test", "arm": "test", "early-base": "val", "early": "val"
    }  # fmt: skip
    assert rows["base"].best == {0: 5.0, 1: 5.0} and rows["early-base"].best == rows["early"].best == {0: 4.0, 1: 4.0}
    assert rows["arm"].gap.value == pytest.approx(1.2) and rows["early"].gap.value == pytest.approx(1.0)
    assert split_note(list(rows.values())) == "best on validation, mean over seeds; on test with that model: base, arm"
    assert split_note([rows["base"], rows["arm"]]).startswith("on test, with the model that was best on validation")
    assert split_note([rows["early"]]) == "best on validation, mean over seeds"


def test_a_gap_of_accuracies_is_the_mean_difference(tmp_path: Path) -> None:
    runs = runs_of(BERT, tmp_path, [0, 1], "bert", "bert-arm")
    for (name, seed), best in {("bert", 0): 0.9, ("bert", 1): 0.8, ("bert-arm", 0): 0.85, ("bert-arm", 1): 0.79}.items():
        finish(runs[name, seed], best)
    bert, arm = summarize(list(runs.values()))
    assert bert.mean == pytest.approx(0.85) and arm.gap.value == pytest.approx(-0.03)


def test_arms_stand_behind_their_baseline_wherever_the_catalog_has_them(tmp_path: Path) -> None:
    runs = runs_of(CATALOG, tmp_path, [0], "all")
    for run in runs.values():
        finish(run, 4.0)
    assert [row.experiment.id for row in summarize(list(runs.values()))] == ["base", "arm", "early-base", "early"]


def test_an_arm_whose_baseline_is_not_in_the_queue_has_no_gap(tmp_path: Path) -> None:
    runs = runs_of(CATALOG, tmp_path, [0], "arm")
    finish(runs["arm", 0], 4.0)
    [row] = summarize(list(runs.values()))
    assert row.gap.text == "" and row.confounded == ()


def test_a_confounded_arm_says_by_what(tmp_path: Path) -> None:
    runs = runs_of(CATALOG, tmp_path, [0], "early", "early-base", "arm", "base")
    for run in runs.values():
        finish(run, 4.0)
    rows = {row.experiment.id: row.confounded for row in summarize(list(runs.values()))}
    assert rows == {"base": (), "arm": (), "early-base": (), "early": ("optim.lr 0.5 against 0.002",)}


def test_a_gap_is_said_with_its_interval_and_one_seed_has_none() -> None:
    cases: list[tuple[dict[int, float], str, str]] = [
        ({2: 1.0}, "ppl", ""),
        ({0: 1.098, 1: 1.098}, "ppl", "+9.8% [+9.8, +9.8]"),
        ({0: 1.098}, "ppl", "+9.8%"),
        ({0: 0.954, 1: 0.954}, "accuracy", "-4.60 [-4.60, -4.60]"),
        ({0: 1.01}, "accuracy", "+1.00"),
    ]
    for ours, metric, text in cases:
        with case(ours, metric, text):
            assert paired_gap(ours, {0: 1.0, 1: 1.0}, metric).text == text


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [("ppl", 4.268, "4.27"), ("accuracy", 0.9312, "93.12%"), ("ppl", None, ""), ("accuracy", None, "")],
)
def test_a_figure_is_said_as_people_read_it(metric: str, value: float | None, text: str) -> None:
    assert figure_text(metric, value) == text
