"""Runs are compared with their baselines while they go on: at the same step, in the same figure, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oelm.method.method import resolve_method
from oelm.runs.find import gaps, scan
from oelm.runs.metrics import evaluations
from tests.experiments.recorded import record


def rows(run: Path, *values: dict[str, Any]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))


def test_evaluations_are_read_by_step_without_a_torn_tail(tmp_path: Path) -> None:
    rows(
        tmp_path, {"step": 1, "loss": 3.0}, {"step": 2, "val_loss": 2.5}, {"step": 3, "loss": 2.0}, {"step": 4, "val_loss": 2.0}
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('"val_loss"\n{"val_loss": 1}\n{"step": "5", "val_loss": 1}\n{"step": 6, "val_loss": 1.5}')
    assert {step: row["val_loss"] for step, row in evaluations(tmp_path).items()} == {2: 2.5, 4: 2.0}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert list(evaluations(tmp_path)) == [2, 4, 6]
    assert evaluations(tmp_path / "gone") == {}


BASELINES = {"GPT-02": "GPT-01"}


def gap_of(root: Path, *, only: tuple[str, ...] = ()) -> tuple[float, str, int] | None:
    views = scan(root, only=only)
    found = dict(zip([view.experiment for view in views], gaps(views, BASELINES), strict=True))
    gap = found["GPT-02"]
    return None if gap is None else (round(gap.value, 6), gap.unit, gap.step)


@pytest.mark.parametrize("only", [(), ("GPT-02",)])
def test_a_finished_pair_is_compared_by_its_best(tmp_path: Path, only: tuple[str, ...]) -> None:
    record(tmp_path, "done", best=33.6, metric="ppl")
    record(tmp_path, "done", experiment="GPT-01", best=32.0, metric="ppl")
    assert gap_of(tmp_path, only=only) == (5.0, "%", 600)


def test_accuracy_is_compared_in_points(tmp_path: Path) -> None:
    record(tmp_path, "done", best=0.90, metric="accuracy")
    record(tmp_path, "done", experiment="GPT-01", best=0.925, metric="accuracy")
    assert gap_of(tmp_path) == (-2.5, "pt", 600)


def test_an_unfinished_run_is_compared_at_the_same_step_only(tmp_path: Path) -> None:
    ours = record(tmp_path, "stopped", best=40.0, metric="ppl")
    theirs = record(tmp_path, "done", experiment="GPT-01", best=20.0, metric="ppl")
    rows(ours, {"step": 100, "val_loss": 4.0, "val_ppl": 60.0}, {"step": 200, "val_loss": 3.9, "val_ppl": 40.0})
    rows(theirs, *({"step": step, "val_loss": 3.0, "val_ppl": 50.0 - step / 10} for step in (100, 200, 300)))
    assert gap_of(tmp_path) == (round(100 * (40 / 30 - 1), 6), "%", 200)


def test_runs_of_other_lengths_are_compared_at_the_same_step(tmp_path: Path) -> None:
    ours = record(tmp_path, "done", best=10.0, metric="ppl", steps=1200)
    theirs = record(tmp_path, "done", experiment="GPT-01", best=20.0, metric="ppl")
    for run, value in ((ours, 22.0), (theirs, 20.0)):
        rows(run, {"step": 600, "val_loss": 3.0, "val_ppl": value})
    assert gap_of(tmp_path) == (10.0, "%", 600)


@pytest.mark.parametrize(
    "theirs",
    [
        {"seed": 1, "best": 20.0, "metric": "ppl"},
        {"budget": "laptop", "best": 20.0, "metric": "ppl"},
        {"variant": "other", "best": 20.0, "metric": "ppl"},
        {"best": 0.5, "metric": "accuracy"},
        {"best": None, "metric": ""},
        {"best": 0.0, "metric": "ppl"},
        {"best": 5e-324, "metric": "ppl"},
    ],
)
def test_what_does_not_compare_has_no_gap(tmp_path: Path, theirs: dict[str, Any]) -> None:
    record(tmp_path, "done", best=21.0, metric="ppl")
    record(tmp_path, "done", experiment="GPT-01", **theirs)
    assert gap_of(tmp_path) is None


@pytest.mark.parametrize("value", [None, "low", True, 10**400, [1]])
def test_a_figure_that_is_no_number_has_no_gap_and_is_no_crash(tmp_path: Path, value: Any) -> None:
    for experiment in ("GPT-01", "GPT-02"):
        rows(
            record(tmp_path, "stopped", experiment=experiment, best=1.0, metric="ppl"),
            {"step": 1, "val_loss": 1.0, "val_ppl": value},
        )
    assert gap_of(tmp_path) in (None, (0.0, "%", 1))


def own_run(root: Path, method: str, best: float, **settings: Any) -> None:
    """Record a finished run of `oelm train`, with a config of its own."""
    variant = f"{method}-{len(list(root.glob('train/smoke/*'))):08d}"
    run = record(root, "done", experiment="train", variant=variant, best=best, metric="ppl")
    config = {"seed": 0, "method": resolve_method(method).model_dump(mode="json"), "steps": 600, **settings}
    (run / "config.json").write_text(json.dumps(config))


def test_a_run_of_oelm_train_is_compared_with_the_baseline_of_its_config(tmp_path: Path) -> None:
    own_run(tmp_path, "baseline", 20.0)
    own_run(tmp_path, "oelm_freeze", 22.0)
    # Other data: another comparison.
    own_run(tmp_path, "baseline", 40.0, data="other")
    own_run(tmp_path, "oelm_freeze", 50.0, data="other")
    own_run(tmp_path, "oelm_lowrank", 60.0, data="third")
    views = scan(tmp_path)
    found = {
        view.status.best: gap and round(gap.value) for view, gap in zip(views, gaps(views, {}), strict=True) if view.status
    }
    assert found == {20.0: None, 22.0: 10, 40.0: None, 50.0: 25, 60.0: None}
    # Also where the baseline itself is not among the runs shown.
    (arm,) = [view for view in views if view.status is not None and view.status.best == 22.0]
    assert [gap and round(gap.value) for gap in gaps([arm], {})] == [10]


def test_a_method_that_freezes_nothing_is_no_baseline_unless_it_is_the_preset(tmp_path: Path) -> None:
    own_run(tmp_path, "oelm_freeze", 22.0)
    own_run(tmp_path, "baseline", 20.0)
    (baseline,) = tmp_path.glob("train/smoke/baseline-*/seed-0/config.json")
    config = json.loads(baseline.read_text())
    config["method"]["init"] = "orthogonal"
    baseline.write_text(json.dumps(config))
    assert gaps(scan(tmp_path), {}) == [None, None]
