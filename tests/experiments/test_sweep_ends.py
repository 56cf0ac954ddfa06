"""How a sweep ends: which failures take a point out, which are close to the best, and which record of two sweeps stands."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from oelm.errors import ConfigError, NonFiniteError, OutOfMemoryError
from oelm.experiments.plan import PlannedRun
from oelm.experiments.sweep import Grid, SweepPlan, conclude_sweep, plan_sweep, read_sweep, standing, take_over, tuned_changes
from tests.experiments.planned import PAIR, catalog_of, finish
from tests.experiments.recorded import record

CATALOG = catalog_of(PAIR + "other: {extends: arm, title: elsewhere}\n")
ARMS = [CATALOG.get("base"), CATALOG.get("arm")]
GRID: Grid = {"optim.lr": [1e-3, 2e-3, 4e-3]}
BEST = 2e-3
DIVERGED = f"{NonFiniteError.__name__}: step 7: loss nan, gradient norm nan: stopped before the update"
NO_ROOM = f"{OutOfMemoryError.__name__}: out of memory\n(another job had it)"


def plan(root: Path, grid: Grid = GRID, *, num_seeds: int = 2) -> SweepPlan:
    return plan_sweep(ARMS, grid, budget="smoke", num_seeds=num_seeds, root=root, changes={})


def train(run: PlannedRun) -> None:
    """Finish a run: the nearer to the best rate, the better."""
    finish(run, 3.0 + abs(math.log(run.config.optim.lr / BEST)))


def fail(run: PlannedRun, root: Path, message: str) -> None:
    record(root, "failed", experiment=run.experiment.id, variant=run.variant, seed=run.seed, message=message)


def swept(root: Path, grid: Grid = GRID, *, num_seeds: int = 2) -> SweepPlan:
    made = plan(root, grid, num_seeds=num_seeds)
    for run in made.runs:
        train(run)
    conclude_sweep(made)
    return made


def of(made: SweepPlan, experiment: str, lr: float) -> PlannedRun:
    return next(run for run in made.runs if run.experiment.id == experiment and run.config.optim.lr == lr)


@pytest.mark.parametrize("message", [NO_ROOM, "DataError: text.txt: gone", "error: " + DIVERGED, "NonFiniteErrors", ""])
def test_an_arm_is_not_tuned_on_fewer_points_because_a_run_failed_by_accident(message: str, tmp_path: Path) -> None:
    made = swept(tmp_path)
    fail(of(made, "base", BEST), tmp_path, message)
    base, arm = conclude_sweep(made)
    assert (base.best, arm.best) == (None, 1) and not base.points[1].has_failed and base.at_edge == ()
    with pytest.raises(ConfigError, match="^--tuned: the sweep of base is not finished: optim.lr 0.002 failed"):
        tuned_changes(ARMS, "smoke", tmp_path, changes={})


def test_which_point_failed_and_why_is_told_in_one_line_with_what_to_do(tmp_path: Path) -> None:
    made = swept(tmp_path)
    fail(of(made, "arm", 4e-3), tmp_path, NO_ROOM)
    conclude_sweep(made)
    why = (
        "is not finished: optim.lr 0.004 failed (seed 100: OutOfMemoryError: out of memory (another job had it)); "
        "fix that, and repeat its command with --retry"
    )
    with pytest.raises(ConfigError) as told:
        tuned_changes(ARMS, "smoke", tmp_path, changes={})
    assert str(told.value) == f"--tuned: the sweep of arm {why}"
    with pytest.raises(ConfigError) as told:
        take_over([CATALOG.get("other")], ARMS[1], budget="smoke", root=tmp_path)
    assert str(told.value) == f"--like arm: its sweep {why}"


def test_a_point_that_is_trained_after_all_counts(tmp_path: Path) -> None:
    made = swept(tmp_path)
    fail(of(made, "base", BEST), tmp_path, NO_ROOM)
    conclude_sweep(made)
    train(of(made, "base", BEST))
    base, _ = conclude_sweep(made)
    assert (base.best, base.points[1].problem, base.why_no_best) == (1, "", "")
    assert tuned_changes(ARMS, "smoke", tmp_path, changes={}).changes["base"] == {"optim.lr": BEST}


def test_a_point_that_diverged_for_one_seed_is_out_whatever_befell_the_others(tmp_path: Path) -> None:
    made = swept(tmp_path)
    first, second = [run for run in made.runs if run.experiment.id == "arm" and run.config.optim.lr == BEST]
    fail(first, tmp_path, NO_ROOM)
    fail(second, tmp_path, DIVERGED)
    _, arm = conclude_sweep(made)
    assert arm.points[1].has_failed and arm.points[1].problem == "" and arm.best == 0


@pytest.mark.parametrize(
    ("message", "words"),
    [(DIVERGED, "has no best: the loss was not finite at any point; sweep other values"), (NO_ROOM, "is not finished: ")],
)
def test_a_sweep_of_failures_has_no_best_and_says_what_to_do(message: str, words: str, tmp_path: Path) -> None:
    made = plan(tmp_path)
    for run in made.runs:
        fail(run, tmp_path, message)
    records = conclude_sweep(made)
    assert [found.best for found in records] == [None, None] and all(words in found.why_no_best for found in records)
    assert read_sweep("arm", "smoke", tmp_path) == records[1]


WIDER: Grid = {"optim.lr": [*GRID["optim.lr"], 8e-3]}
APART: Grid = {"optim.lr": [2e-3, 6e-3]}


@pytest.mark.parametrize(("grid", "num_seeds"), [(WIDER, 2), (APART, 2), (GRID, 3)], ids=["wider", "apart", "more seeds"])
def test_a_finished_sweep_stands_until_the_next_one_is_finished_for_every_arm(
    grid: Grid, num_seeds: int, tmp_path: Path
) -> None:
    swept(tmp_path)
    before = tuned_changes(ARMS, "smoke", tmp_path, changes={})
    other = plan(tmp_path, grid, num_seeds=num_seeds)
    for run in [None, *other.runs]:
        if run is not None:
            train(run)
        records = conclude_sweep(other)
        if run is not other.runs[-1]:
            assert records[1].best is None and list(standing(records, tmp_path)) == ["base", "arm"]
            assert tuned_changes(ARMS, "smoke", tmp_path, changes={}) == before
    assert standing(records, tmp_path) == {} and read_sweep("base", "smoke", tmp_path) == records[0]
    after = tuned_changes(ARMS, "smoke", tmp_path, changes={})
    assert after.changes == before.changes and (after.variant == before.variant) == (grid == GRID)


def test_an_arm_that_joins_later_is_recorded_while_the_finished_ones_stand(tmp_path: Path) -> None:
    swept(tmp_path)
    joined = [ARMS[0], CATALOG.get("other")]
    made = plan_sweep(joined, WIDER, budget="smoke", num_seeds=2, root=tmp_path, changes={})
    for run in made.runs[:-1]:
        train(run)
    records = conclude_sweep(made)
    assert [found.best is None for found in records] == [False, True]
    assert tuned_changes(ARMS, "smoke", tmp_path, changes={}).changes["base"] == {"optim.lr": BEST}
    with pytest.raises(ConfigError, match="^--tuned: the sweep of other is not finished; repeat its command$"):
        tuned_changes(joined, "smoke", tmp_path, changes={})


def test_a_sweep_whose_runs_are_gone_is_unfinished_again(tmp_path: Path) -> None:
    made = swept(tmp_path)
    record(tmp_path, "queued", experiment="arm", variant=made.runs[-1].variant, seed=made.runs[-1].seed)
    records = conclude_sweep(made)
    assert standing(records, tmp_path) == {} and read_sweep("arm", "smoke", tmp_path).best is None


def test_a_sweep_that_was_taken_over_stands_until_the_arm_s_own_is_finished(tmp_path: Path) -> None:
    swept(tmp_path)
    other = CATALOG.get("other")
    take_over([other], ARMS[1], budget="smoke", root=tmp_path)
    own = plan_sweep([other], GRID, budget="smoke", num_seeds=2, root=tmp_path, changes={})
    conclude_sweep(own)
    assert read_sweep("other", "smoke", tmp_path).like == "arm"
    for run in own.runs:
        train(run)
    conclude_sweep(own)
    assert read_sweep("other", "smoke", tmp_path).like is None


@pytest.mark.parametrize(("content", "told"), [("", "the file is empty"), ("{}", r"\w+: Field required")])
def test_a_damaged_record_is_refused_with_what_is_wrong(content: str, told: str, tmp_path: Path) -> None:
    swept(tmp_path)
    (tmp_path / "arm" / "smoke" / "sweep.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"sweep.json: damaged \({told}\); restore it from a copy, or repeat the sweep"):
        read_sweep("arm", "smoke", tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[1]"])
def test_a_damaged_record_gives_way_to_any(content: str, tmp_path: Path) -> None:
    swept(tmp_path)
    (tmp_path / "arm" / "smoke" / "sweep.json").write_text(content)
    records = conclude_sweep(plan(tmp_path, WIDER))
    assert list(standing(records, tmp_path)) == ["base"] and read_sweep("arm", "smoke", tmp_path) == records[1]


@pytest.mark.parametrize(
    ("losses", "close"),
    [((3.0, 3.0099, 3.02), [1]), ((3.0099, 3.0, 3.005), [0, 2]), ((3.0, 3.0101, 4.0), []), ((3.0, 3.0, 3.0), [1, 2])],
)
def test_points_that_another_seed_may_choose_are_close(losses: tuple[float, ...], close: list[int], tmp_path: Path) -> None:
    made = plan_sweep(ARMS[:1], GRID, budget="smoke", num_seeds=1, root=tmp_path, changes={})
    for run, loss in zip(made.runs, losses, strict=True):
        finish(run, loss)
    [found] = conclude_sweep(made)
    assert found.close == tuple(found.points[number] for number in close)


@pytest.mark.parametrize(("num_seeds", "close"), [(1, 2), (4, 1), (16, 0)])
def test_the_more_seeds_were_tried_the_closer_is_close(num_seeds: int, close: int, tmp_path: Path) -> None:
    made = plan(tmp_path, num_seeds=num_seeds)
    for run in made.runs:
        finish(run, {1e-3: 3.0, 2e-3: 3.004, 4e-3: 3.008}[run.config.optim.lr])
    assert [len(found.close) for found in conclude_sweep(made)] == [close, close]


def test_nothing_is_close_to_a_best_that_is_not_there(tmp_path: Path) -> None:
    made = plan_sweep(ARMS[:1], GRID, budget="smoke", num_seeds=1, root=tmp_path, changes={})
    for run in made.runs[:-1]:
        finish(run, 3.0)
    [found] = conclude_sweep(made)
    assert found.best is None and found.close == ()
