"""A sweep gives every arm the same points and seeds, and tells the best of each only when all of them are there."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.errors import ConfigError, DataError
from oelm.experiments.catalog import Experiment
from oelm.experiments.plan import variant_name
from oelm.experiments.study import Study
from oelm.experiments.sweep import (
    FIRST_SEED,
    Grid,
    SweepPlan,
    conclude_sweep,
    edges,
    parse_grid,
    plan_sweep,
    read_sweep,
    take_over,
    tuned_changes,
)
from oelm.files import read_json, write_json
from oelm.runs.layout import SWEEP
from tests.cases import case
from tests.experiments.planned import PAIR, catalog_of, finish
from tests.experiments.recorded import record

TASK = "task: {kind: classifier, title: another kind, data: stdlib-packages}\n"
MORE = "".join(f"{name}: {{extends: arm, title: elsewhere}}\n" for name in ("other", "third", "fourth"))
CATALOG = catalog_of(PAIR + MORE + TASK)
ARMS = [CATALOG.get("base"), CATALOG.get("arm")]
LRS = [1e-3, 2e-3, 4e-3]
GRID: Grid = {"optim.lr": LRS}


def plan(root: Path, grid: Grid = GRID, *, num_seeds: int = 2, changes: dict[str, Any] | None = None) -> SweepPlan:
    return plan_sweep(ARMS, grid, budget="smoke", num_seeds=num_seeds, root=root, changes=changes or {})


def swept(
    root: Path, best: dict[str, float], *, grid: Grid = GRID, num_seeds: int = 2, changes: dict[str, Any] | None = None
) -> SweepPlan:
    """Return a sweep whose runs are all finished, the nearer to the arm's best lr the better."""
    made = plan(root, grid, num_seeds=num_seeds, changes=changes)
    for run in made.runs:
        finish(run, 3.0 + abs(math.log(run.config.optim.lr / best[run.experiment.id])))
    conclude_sweep(made)
    return made


def test_a_grid_is_read_as_numbers_in_their_order() -> None:
    grid = parse_grid(["optim.lr=4e-3, 1e-3,2e-3", "schedule.warmup_steps=50,10"])
    assert grid == {"optim.lr": [1e-3, 2e-3, 4e-3], "schedule.warmup_steps": [10, 50]}


def test_a_grid_of_words_keeps_the_order_it_was_given() -> None:
    assert parse_grid(["precision=float32,bf16", "compile=true,false"]) == {
        "precision": ["float32", "bf16"],
        "compile": [True, False],
    }


def test_a_grid_that_means_nothing_is_refused_as_it_was_written() -> None:
    cases: list[tuple[list[str], str]] = [
        ([], "^name what to try: --grid optim.lr=3e-4,1e-3$"),
        (["optim.lr"], "write it as key=value,value"),
        (["optim.lr="], "write it as key=value,value"),
        (["optim.lr=1e-3"], "a sweep needs two values at least; or use `oelm run --set optim.lr=1e-3`$"),
        (["optim.lr=1e-3,,"], "a sweep needs two values at least"),
        (["=1,2"], "write it as key=value,value"),
        (["optim..lr=1,2"], "write it as key=value,value"),
        ([".=1,2"], "write it as key=value,value"),
        (["optim.lr=1e-3,0.001"], "is given twice"),
        (["optim.lr=1,1.0"], "is given twice"),
        (["optim.lr=1,2", "optim.lr=3,4"], "is given twice"),
        (["optim.lr=1,1e999"], "every number must be finite"),
        (["seed=1,2"], "seed cannot be tuned"),
        (["method=baseline,oelm_freeze"], "method cannot be tuned"),
        (["method.init=orthogonal,gaussian"], "method.init cannot be tuned"),
    ]
    for texts, message in cases:
        with case(texts, message):
            with pytest.raises(ConfigError, match=message) as caught:
                parse_grid(texts)
            assert not texts or str(caught.value).startswith(f"--grid {texts[-1]!r}: ")


def test_how_fast_an_arm_learns_is_tuned_though_it_stands_in_the_method() -> None:
    grid = parse_grid(["method.layer_lr_decay=1.0,0.8", "method.warmup_steps=50,100"])
    assert grid == {"method.layer_lr_decay": [0.8, 1.0], "method.warmup_steps": [50, 100]}


@given(st.lists(st.text(max_size=12), max_size=3))
def test_any_grid_is_read_or_refused(texts: list[str]) -> None:
    try:
        grid = parse_grid(texts)
    except ConfigError:
        return
    assert len(grid) == len(texts) and all(len(values) > 1 for values in grid.values())


def test_every_arm_gets_the_same_points_and_seeds_and_none_of_a_comparison_s(tmp_path: Path) -> None:
    grid: Grid = {"optim.lr": LRS, "schedule.warmup_steps": [2, 4]}
    made = plan(tmp_path, grid, num_seeds=3)
    by_arm = {arm.id: {(run.variant, run.seed) for run in made.runs if run.experiment.id == arm.id} for arm in ARMS}
    assert by_arm["base"] == by_arm["arm"] and len(by_arm["arm"]) == 6 * 3 == len(made.runs) // 2
    assert {run.seed for run in made.runs} == {FIRST_SEED, FIRST_SEED + 1, FIRST_SEED + 2} and FIRST_SEED == 100
    assert [values for values, _ in made.points["arm"]] == [
        {"optim.lr": lr, "schedule.warmup_steps": n} for lr in LRS for n in (2, 4)
    ]
    for run in made.runs:
        changed = {"optim.lr": run.config.optim.lr, "schedule.warmup_steps": run.config.schedule.warmup_steps}
        assert run.variant == variant_name(changed)


def test_a_sweep_goes_seed_by_seed_so_that_a_whole_one_comes_early(tmp_path: Path) -> None:
    assert [run.seed for run in plan(tmp_path).runs] == [100] * 6 + [101] * 6


def test_a_setting_cannot_be_set_and_swept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^--set optim.lr: the sweep tries several values of it"):
        plan(tmp_path, changes={"optim.lr": 1.0})


def test_the_best_is_the_least_mean_over_seeds_of_each_arm(tmp_path: Path) -> None:
    made = plan(tmp_path)
    scores = {"base": [(3.0, 3.4), (3.1, 3.1), (3.3, 3.3)], "arm": [(4.0, 4.0), (3.9, 4.2), (3.8, 4.1)]}
    for name, points in made.points.items():
        for (_, runs), losses in zip(points, scores[name], strict=True):
            for run, loss in zip(runs, losses, strict=True):
                finish(run, loss)
    base, arm = conclude_sweep(made)
    assert (base.experiment, base.best, base.at_edge) == ("base", 1, ())
    assert (arm.experiment, arm.best, arm.at_edge) == ("arm", 2, ("optim.lr",))
    assert [point.score for point in base.points] == [pytest.approx(sum(losses) / 2) for losses in scores["base"]]
    assert read_sweep("arm", "smoke", tmp_path) == arm


def test_the_best_of_classifiers_is_the_most_accurate(tmp_path: Path) -> None:
    [arm] = catalog_of("bert: {kind: classifier, data: sst2}")
    made = plan_sweep([arm], GRID, budget="smoke", num_seeds=1, root=tmp_path, changes={})
    for run, accuracy in zip(made.runs, (0.7, 0.9, 0.8), strict=True):
        finish(run, accuracy)
    [found] = conclude_sweep(made)
    assert found.best == 1 and found.points[1].score == pytest.approx(0.1)


@pytest.mark.parametrize("left", ["queued", "running", "stopped", None])
def test_an_unfinished_sweep_has_no_best_however_good_the_rest_is(left: Any, tmp_path: Path) -> None:
    made = plan(tmp_path)
    for run in made.runs[:-1]:
        finish(run, 3.0)
    last = made.runs[-1]
    if left is not None:
        record(tmp_path, left, experiment="arm", variant=last.variant, seed=last.seed, best=1.0, metric="ppl")
    base, arm = conclude_sweep(made)
    assert (base.best, arm.best, arm.at_edge) == (0, None, ()) and arm.points[-1].score is None
    with pytest.raises(ConfigError, match="^--tuned: the sweep of arm is not finished; repeat its command$"):
        tuned_changes(ARMS, "smoke", tmp_path, changes={})


def test_a_point_that_cannot_be_trained_is_never_the_best_and_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    made = plan(tmp_path)
    for run in made.runs:
        finish(run, 3.0 + run.config.optim.lr)
    first = next(run for run in made.runs if run.experiment.id == "arm")
    told: dict[str, Any] = {"best": 1.0, "metric": "ppl", "message": "NonFiniteError: step 7: loss nan"}
    record(tmp_path, "failed", experiment="arm", variant=first.variant, seed=first.seed, **told)
    base, arm = conclude_sweep(made)
    assert base.best == 0 and arm.best == 1 and arm.points[0].has_failed and arm.points[0].score is None
    assert tuned_changes(ARMS, "smoke", tmp_path, changes={})[0]["arm"]["optim.lr"] == LRS[1]


@pytest.mark.parametrize("content", ["{}", "[]", '{"best_val_loss": null}', '{"best_val_loss": "low"}', "{", "NaN"])
def test_a_finished_run_without_figures_is_told_by_its_file(content: str, tmp_path: Path) -> None:
    made = swept(tmp_path, {"base": 2e-3, "arm": 2e-3})
    (made.runs[3].path / "timing_stats.json").write_text(content)
    with pytest.raises(DataError, match=str(made.runs[3].path / "timing_stats.json")):
        conclude_sweep(made)


def test_a_score_that_the_run_s_evaluations_do_not_give_is_refused(tmp_path: Path) -> None:
    made = swept(tmp_path, {"base": 2e-3, "arm": 2e-3})
    score = json.loads((made.runs[3].path / "timing_stats.json").read_text())["best_val_loss"]
    metrics = made.runs[3].path / "metrics.jsonl"
    metrics.write_text(
        json.dumps({"step": 5, "val_loss": score + 1}) + "\n" + json.dumps({"step": 8, "val_loss": score}) + "\n"
    )
    conclude_sweep(made)
    metrics.write_text(json.dumps({"step": 5, "val_loss": score + 1}) + "\n")
    with pytest.raises(
        DataError, match=rf"seed-\d+/timing_stats\.json: its best gives the score {score}, metrics\.jsonl gives"
    ):
        conclude_sweep(made)


def test_a_best_that_has_not_the_least_score_is_refused(tmp_path: Path) -> None:
    conclude_sweep(swept(tmp_path, {"base": 2e-3, "arm": 2e-3}))
    path = tmp_path / "arm" / "smoke" / SWEEP
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"best": (record["best"] + 1) % len(record["points"])}))
    with pytest.raises(ConfigError, match=r"sweep\.json: damaged .*best is point \d+ with the score .*repeat the sweep"):
        read_sweep("arm", "smoke", tmp_path)


def test_a_best_number_at_the_edge_of_its_grid_is_told() -> None:
    cases: list[tuple[Grid, dict[str, Any], tuple[str, ...]]] = [
        ({"a": [1, 2, 3]}, {"a": 2}, ()),
        ({"a": [1, 2, 3]}, {"a": 1}, ("a",)),
        ({"a": [1, 2, 3]}, {"a": 3}, ("a",)),
        ({"a": [1, 2, 3], "b": [1.5, 2.5]}, {"a": 2, "b": 2.5}, ("b",)),
        ({"a": ["x", "y"]}, {"a": "x"}, ()),
        ({"a": [True, False]}, {"a": True}, ()),
    ]
    for grid, values, at in cases:
        with case(grid, values, at):
            assert edges(grid, values) == at


def test_tuned_arms_have_each_its_own_best_and_one_variant(tmp_path: Path) -> None:
    swept(tmp_path, {"base": 1e-3, "arm": 4e-3})
    chosen, variant, _ = tuned_changes(ARMS, "smoke", tmp_path, changes={"steps": 9})
    assert chosen == {"base": {"steps": 9, "optim.lr": 1e-3}, "arm": {"steps": 9, "optim.lr": 4e-3}}
    assert (
        re.fullmatch("tuned-steps-9-[0-9a-f]{8}", variant) and variant != tuned_changes(ARMS, "smoke", tmp_path, changes={})[1]
    )


def test_tuned_arms_are_planned_in_one_place_and_are_not_confounded_by_what_was_tuned(tmp_path: Path) -> None:
    from oelm.experiments.summary import summarize

    swept(tmp_path, {"base": 1e-3, "arm": 4e-3})
    runs = Study(("arm",), "smoke", tmp_path, seeds=[0, 1], tuned=True).plan(CATALOG)
    assert [run.config.optim.lr for run in runs] == [1e-3, 4e-3] * 2 and len({run.variant for run in runs}) == 1
    for run in runs:
        finish(run, 5.0)
    assert [row.confounded for row in summarize(runs)] == [(), ()]


def test_families_of_two_baselines_may_have_a_grid_each_and_a_variant_each(tmp_path: Path) -> None:
    catalog = catalog_of(PAIR + "base2: {extends: base, title: b}\narm2: {extends: arm, title: a, baseline: base2}\n")
    for names, grid in ((("base", "arm"), [1e-3, 2e-3]), (("base2", "arm2"), [1e-3, 2e-3, 4e-3])):
        arms = [catalog.get(name) for name in names]
        plan = plan_sweep(arms, {"optim.lr": grid}, budget="smoke", num_seeds=1, root=tmp_path, changes={})
        for run in plan.runs:
            finish(run, 1 / run.config.optim.lr)
        conclude_sweep(plan)
    runs = Study(("arm", "arm2"), "smoke", tmp_path, seeds=[5, 3], tuned=True).plan(catalog)
    assert [(run.experiment.id, run.seed) for run in runs[:4]] == [("base", 5), ("base2", 5), ("arm", 5), ("arm2", 5)]
    assert {run.experiment.id: run.config.optim.lr for run in runs} == {"base": 2e-3, "arm": 2e-3, "base2": 4e-3, "arm2": 4e-3}
    first, second = (
        {run.variant for run in runs if run.experiment.id.endswith("2") == is_second} for is_second in (False, True)
    )
    assert len(first) == len(second) == 1 and first != second


def test_what_the_user_sets_cannot_be_tuned_as_well(tmp_path: Path) -> None:
    swept(tmp_path, {"base": 1e-3, "arm": 4e-3})
    with pytest.raises(ConfigError, match="^--set optim.lr: the sweep tries several values of it"):
        tuned_changes(ARMS, "smoke", tmp_path, changes={"optim.lr": 0.5})


def test_an_arm_that_was_not_swept_is_refused_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="^--tuned: base was not swept at smoke.*oelm sweep arm --budget smoke --grid optim.lr=..."
    ):
        tuned_changes(ARMS, "smoke", tmp_path, changes={})


@pytest.mark.parametrize(
    "other",
    [{"grid": {"optim.lr": [1e-3, 4e-3]}}, {"num_seeds": 1}, {"changes": {"batch_size": 16}}],
    ids=["grid", "seeds", "set"],
)
def test_arms_of_different_sweeps_are_refused(other: dict[str, Any], tmp_path: Path) -> None:
    best = {"base": 1e-3, "arm": 4e-3}
    swept(tmp_path, best)
    swept(tmp_path / "other", best, **other)
    write_json(tmp_path / "arm" / "smoke" / SWEEP, read_json(tmp_path / "other" / "arm" / "smoke" / SWEEP))
    with pytest.raises(
        ConfigError, match="^--tuned: arm and base were swept over different grids or seeds or with different --set"
    ):
        tuned_changes(ARMS, "smoke", tmp_path, changes={})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"best": 0', '"best": 99'),
        lambda text: text.replace('"best": 0', '"best": -1'),
        lambda text: text.replace('"best": 0', '"best": "0"'),
        lambda text: text.replace('"budget"', '"budge"'),
        lambda text: json.dumps(json.loads(text) | {"points": []}),
    ],
)
def test_a_damaged_record_is_told_by_its_file(damage: Any, tmp_path: Path) -> None:
    swept(tmp_path, {"base": 1e-3, "arm": 1e-3})
    path = tmp_path / "arm" / "smoke" / SWEEP
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with pytest.raises(ConfigError, match=rf"^{path}: damaged \(.*\); restore it from a copy, or repeat the sweep$"):
        read_sweep("arm", "smoke", tmp_path)


def test_a_sweep_that_is_taken_over_is_used_and_names_whose_it_is(tmp_path: Path) -> None:
    swept(tmp_path, {"base": 2e-3, "arm": 1e-3})
    (taken,) = take_over([CATALOG.get("other")], ARMS[1], budget="smoke", root=tmp_path)
    assert taken == read_sweep("other", "smoke", tmp_path)
    assert (taken.experiment, taken.like, read_sweep("arm", "smoke", tmp_path).like) == ("other", "arm", None)
    changes, variant, like = tuned_changes([ARMS[0], CATALOG.get("other")], "smoke", tmp_path, changes={})
    assert like == {"base": None, "other": "arm"}
    assert changes == {"base": {"optim.lr": 2e-3}, "other": {"optim.lr": 1e-3}}
    assert variant == tuned_changes(ARMS, "smoke", tmp_path, changes={})[1]


def test_a_sweep_taken_over_twice_names_the_one_that_was_swept_and_may_be_replaced(tmp_path: Path) -> None:
    swept(tmp_path, {"base": 2e-3, "arm": 1e-3})
    conclude_sweep(plan_sweep_of(CATALOG.get("fourth"), tmp_path))
    take_over([CATALOG.get("other")], ARMS[1], budget="smoke", root=tmp_path)
    (taken,) = take_over([CATALOG.get("third")], CATALOG.get("other"), budget="smoke", root=tmp_path)
    assert taken.like == "arm"
    take_over([CATALOG.get("third")], CATALOG.get("fourth"), budget="smoke", root=tmp_path)
    assert read_sweep("third", "smoke", tmp_path).like == "fourth"


def test_a_dry_take_over_writes_nothing(tmp_path: Path) -> None:
    swept(tmp_path, {"base": 2e-3, "arm": 1e-3})
    (taken,) = take_over([CATALOG.get("other")], ARMS[1], budget="smoke", root=tmp_path, dry_run=True)
    assert taken.like == "arm" and not (tmp_path / "other").exists()


def test_no_other_best_is_tried_where_runs_have_one(tmp_path: Path) -> None:
    swept(tmp_path, {"base": 2e-3, "arm": 1e-3})
    other, fourth = CATALOG.get("other"), CATALOG.get("fourth")
    conclude_sweep(plan_sweep_of(fourth, tmp_path))
    take_over([other], ARMS[1], budget="smoke", root=tmp_path)
    (tmp_path / "other" / "smoke" / "tuned-01234567").mkdir()
    with pytest.raises(ConfigError, match="^other has runs with the best of arm; for another's give another --out$"):
        take_over([other], fourth, budget="smoke", root=tmp_path)
    assert take_over([other], ARMS[1], budget="smoke", root=tmp_path)[0].like == "arm"


def test_a_stale_copy_is_told_with_the_command_that_renews_it(tmp_path: Path) -> None:
    swept(tmp_path, {"base": 2e-3, "arm": 1e-3})
    take_over([CATALOG.get("other")], ARMS[1], budget="smoke", root=tmp_path)
    swept(tmp_path, {"base": 2e-3, "arm": 1e-3}, num_seeds=3)
    with pytest.raises(ConfigError, match="repeat oelm sweep other --like arm$"):
        tuned_changes([ARMS[0], CATALOG.get("other")], "smoke", tmp_path, changes={})


@pytest.mark.parametrize(("base", "is_fair"), [(None, False), ("first", True), ("second", False)])
def test_runs_know_whether_they_were_tuned_as_their_baseline(base: str | None, is_fair: bool, tmp_path: Path) -> None:
    """Of a pair whose arm has the best of `arm`, on whose baseline's sweep does the baseline stand?"""
    text = "{0}base: {{extends: base, title: b}}\n{0}arm: {{extends: arm, title: a, baseline: {0}base}}\n"
    catalog = catalog_of(PAIR + text.format("first") + text.format("second"))
    arms = [catalog.get(name) for name in ("firstbase", "firstarm", "secondbase", "secondarm")]
    made = plan_sweep(arms, GRID, budget="smoke", num_seeds=1, root=tmp_path, changes={})
    for run in made.runs:
        finish(run, 3.0 + abs(math.log(run.config.optim.lr / (1e-3 if run.experiment.id.endswith("arm") else 2e-3))))
    conclude_sweep(made)
    if base is None:
        conclude_sweep(plan_sweep_of(catalog.get("base"), tmp_path))
    else:
        take_over([catalog.get("base")], catalog.get(f"{base}base"), budget="smoke", root=tmp_path)
    take_over([catalog.get("arm")], catalog.get("firstarm"), budget="smoke", root=tmp_path)
    runs = Study(names=("arm",), budget="smoke", root=tmp_path, seeds=[0], tuned=True).plan(catalog)
    assert {run.experiment.id: run.tuned for run in runs}["arm"] == (("optim.lr",) if is_fair else ())


def test_an_arm_may_stand_for_others_of_its_baseline(tmp_path: Path) -> None:
    catalog = catalog_of(PAIR + "polar: {extends: arm, title: p, method: gaussian_matched, baseline: base}\n")
    swept(tmp_path, {"base": 2e-3, "arm": 1e-3})
    (taken,) = take_over([catalog.get("polar")], catalog.get("arm"), budget="smoke", root=tmp_path)
    assert taken.like == "arm"
    runs = Study(names=("polar",), budget="smoke", root=tmp_path, seeds=[0], tuned=True).plan(catalog)
    assert {run.experiment.id: (run.config.optim.lr, run.tuned) for run in runs} == {
        "base": (2e-3, ()),
        "polar": (1e-3, ("optim.lr",)),
    }


def plan_sweep_of(experiment: Experiment, root: Path) -> SweepPlan:
    made = plan_sweep([experiment], GRID, budget="smoke", num_seeds=1, root=root, changes={})
    for run in made.runs:
        finish(run, 3.0 + abs(math.log(run.config.optim.lr / 2e-3)))
    return made


def test_nothing_is_taken_over_where_it_would_lie(tmp_path: Path) -> None:
    other = CATALOG.get("other")
    with pytest.raises(ConfigError, match="^--like: arm was not swept at smoke"):
        take_over([other], ARMS[1], budget="smoke", root=tmp_path)
    conclude_sweep(plan(tmp_path))
    with pytest.raises(ConfigError, match="^--like arm: its sweep is not finished"):
        take_over([other], ARMS[1], budget="smoke", root=tmp_path)
    swept(tmp_path, {"base": 2e-3, "arm": 1e-3})
    conclude_sweep(plan_sweep_of(CATALOG.get("fourth"), tmp_path))
    for experiments, message in (
        ([other, CATALOG.get("fourth")], "^fourth was swept itself at smoke"),
        (
            [other, ARMS[0]],
            "^--like arm: it has neither the method nor the baseline of base, so their best may differ; name an arm",
        ),
        ([other, ARMS[1]], "^--like arm: it is one of the experiments"),
        ([other, CATALOG.get("task")], "^--like arm: it is a language model, and task is not$"),
    ):
        with pytest.raises(ConfigError, match=message):
            take_over(experiments, ARMS[1], budget="smoke", root=tmp_path)
    assert not (tmp_path / "other").exists()
