"""Sweeps in portable folders: kept with their runs, and replaced only by one that holds all that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oelm.errors import ConfigError, RunDirError
from oelm.experiments.portable import Archived, archive_runs, check_folder
from oelm.experiments.sweep import SweepPoint, SweepRecord
from oelm.files import write_json
from oelm.runs.find import scan
from oelm.runs.layout import SWEEP
from tests.report.reading import english, rows
from tests.report.synthetic import Fate, write_run, write_sweep, write_tuned


def archive(root: Path, folder: Path) -> Archived:
    return archive_runs(folder, scan(root), weights=False)


# The scores of a sweep's points by learning rate, None for one that is not done.
Scores = dict[float, float | None]
SWEPT: Scores = {0.001: 3.2, 0.002: 3.0, 0.004: 3.1}


def write_scores(
    root: Path, scores: Scores, *, seeds: tuple[int, ...] = (100,), written: str = "2026-01-02", like: str | None = None
) -> Path:
    """Write the sweep of GPT-02 with the best chosen as the product does it; return its file."""
    points = tuple(
        SweepPoint(values={"optim.lr": rate}, variant=f"lr-{rate}", seeds=seeds, score=score) for rate, score in scores.items()
    )
    done = [score for score in scores.values() if score is not None]
    best = list(scores.values()).index(min(done)) if len(done) == len(scores) else None
    sweep = SweepRecord(
        experiment="GPT-02",
        budget="smoke",
        grid={"optim.lr": list(scores)},
        changes={},
        points=points,
        best=best,
        at_edge=(),
        written=written,
        like=like,
    )
    path = root / "GPT-02" / "smoke" / SWEEP
    write_json(path, sweep.model_dump(mode="json"), durable=False)
    return path


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """A root with a finished run and no sweep yet."""
    root = tmp_path / "outputs"
    write_run(root, "GPT-02", 0, Fate(ppl=20.0), budget="smoke")
    return root


def kept_sweep(root: Path, first: Scores, then: Scores, **chosen: Any) -> tuple[bytes, Path, Path, Archived]:
    """Keep a sweep, then another in its place; return the first's bytes, both files, and what came of the second."""
    target = root.parent / "results"
    before = write_scores(root, first).read_bytes()
    archive(root, target)
    ours = write_scores(root, then, **chosen)
    return before, ours, target / "GPT-02" / "smoke" / SWEEP, archive(root, target)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (SWEPT, SWEPT | {0.008: 3.3}),
        (SWEPT, {0.0005: 3.3} | SWEPT),
        (SWEPT | {0.004: None}, SWEPT),
    ],
    ids=["another-point", "a-point-before", "a-point-that-was-not-done"],
)
def test_a_sweep_gives_way_to_one_that_holds_all_of_its_points(swept: Path, first: Scores, then: Scores) -> None:
    before, ours, there, _ = kept_sweep(swept, first, then)
    assert there.read_bytes() == ours.read_bytes() != before and check_folder(swept.parent / "results")[1] == []


def test_a_sweep_gives_way_to_the_same_points_at_more_seeds(swept: Path) -> None:
    _, ours, there, _ = kept_sweep(swept, SWEPT, {rate: 3.0 + rate for rate in SWEPT}, seeds=(100, 101))
    assert there.read_bytes() == ours.read_bytes()


@pytest.mark.parametrize(
    "then",
    [{0.001: 3.2, 0.002: 3.0}, {0.008: 3.0, 0.016: 3.1, 0.032: 3.2, 0.064: 3.3}, SWEPT | {0.004: 2.9}, SWEPT | {0.004: None}],
    ids=["fewer", "others", "another-score", "a-point-undone"],
)
def test_a_sweep_without_a_kept_point_is_refused_and_nothing_is_written(swept: Path, then: Scores) -> None:
    target = swept.parent / "results"
    before = write_scores(swept, SWEPT).read_bytes()
    archive(swept, target)
    write_scores(swept, then)
    write_run(swept, "GPT-02", 1, Fate(ppl=21.0), budget="smoke")
    with pytest.raises(RunDirError, match=r"results/GPT-02/smoke/sweep\.json: holds the point lr-0\.00\d, which .* lacks"):
        archive(swept, target)
    assert (target / "GPT-02" / "smoke" / SWEEP).read_bytes() == before
    assert not (target / "GPT-02" / "smoke" / "default" / "seed-1").exists()


def test_a_sweep_that_was_taken_over_replaces_none_of_its_own(swept: Path) -> None:
    before, _, there, result = kept_sweep(swept, SWEPT | {0.004: None}, SWEPT, like="GPT-05")
    assert there.read_bytes() == before
    (remark,) = result.remarks
    assert remark.startswith("GPT-02/smoke/sweep.json: left as it is") and remark.endswith("only taken over from GPT-05")


def test_a_sweep_of_its_own_replaces_one_that_was_taken_over(swept: Path) -> None:
    target = swept.parent / "results"
    write_scores(swept, SWEPT, like="GPT-05")
    archive(swept, target)
    ours = write_scores(swept, {0.001: 2.2, 0.002: 2.1, 0.003: 2.3})
    archive(swept, target)
    assert (target / "GPT-02" / "smoke" / SWEEP).read_bytes() == ours.read_bytes()


def test_a_sweep_that_was_only_concluded_again_leaves_the_file_alone(swept: Path) -> None:
    before, _, there, result = kept_sweep(swept, SWEPT, SWEPT, written="2026-02-03")
    assert there.read_bytes() == before and result.remarks == ()


def test_a_whole_sweep_stays_while_new_points_are_not_done(swept: Path) -> None:
    before, _, there, result = kept_sweep(swept, SWEPT, SWEPT | {0.008: None})
    assert there.read_bytes() == before
    (remark,) = result.remarks
    assert remark.startswith("GPT-02/smoke/sweep.json: left as it is") and remark.endswith("new points are not done")


def test_a_kept_sweep_that_cannot_be_read_is_not_overwritten(swept: Path) -> None:
    there = swept.parent / "results" / "GPT-02" / "smoke" / SWEEP
    write_json(there, {"experiment": "GPT-02"}, durable=False)
    write_scores(swept, SWEPT)
    with pytest.raises(ConfigError, match=r"results/GPT-02/smoke/sweep\.json: damaged"):
        archive(swept, swept.parent / "results")


def test_a_damaged_sweep_is_left_out_with_a_remark(swept: Path) -> None:
    write_scores(swept, SWEPT).write_text("{")
    result = archive(swept, swept.parent / "results")
    assert "GPT-02/smoke/sweep.json: left out: " in result.remarks[0] and len(result.added) == 1


def test_tuned_arms_are_still_tuned_alike_after_the_journey(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    for experiment, best, rate in (("GPT-01", 0, 3e-4), ("GPT-02", 1, 1e-3)):
        write_sweep(root, experiment, best)
        write_tuned(root, experiment, rate)
    archive(root, tmp_path / "there")
    before, after = (rows(english(place), "verdicts") for place in (root, tmp_path / "there"))
    assert before == after and "CONFOUNDED" not in str(after)
