"""Records for a repository: what a report needs of finished runs, small, without weights or a trace of the machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import oelm
from oelm.cli.app import app
from oelm.errors import ArchiveError
from oelm.experiments.archive import make_archive
from oelm.experiments.collect import find_runs
from oelm.experiments.keep import Kept, keep_records
from oelm.experiments.sweep import SweepPoint, SweepRecord
from oelm.files import write_json
from oelm.runs.layout import METRICS, PREDICTIONS, SWEEP
from oelm.runs.metrics import read_metrics
from tests.conftest import run_here, tiny_config
from tests.experiments.recorded import record
from tests.report.reading import english, rows
from tests.report.synthetic import SEEDS, Fate, write_arm, write_run

PLACE = "GPT-02/smoke/default/seed-0"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one real finished run of more steps than are kept, and one that is not done."""
    folder = tmp_path_factory.mktemp("keep")
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the cat. " * 60)
    root = folder / "outputs"
    run_here(tiny_config(text, steps=230, eval_every=100, save_every=100, batch_size=2), root / PLACE)
    record(root, "stopped", seed=1)
    return root


def kept(outputs: Path, target: Path) -> Path:
    keep_records(outputs, target, runs=find_runs(outputs, []))
    return target / PLACE


def test_only_finished_runs_are_kept_and_the_others_named(outputs: Path, tmp_path: Path) -> None:
    result = keep_records(outputs, tmp_path, runs=find_runs(outputs, []))
    assert result.added == (PLACE,)
    assert "seed-1: left out, for it is not done (stopped)" in result.remarks[0]


def test_records_hold_neither_weights_nor_tokenizer_nor_text(outputs: Path, tmp_path: Path) -> None:
    run = kept(outputs, tmp_path)
    files = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    expected = {"config.json", "manifest.json", "audit.json", "status.json", "timing_stats.json", "attention.json", METRICS}
    expected |= {PREDICTIONS["val"]}
    assert files == expected


def test_every_evaluation_and_at_most_a_hundred_odd_steps_are_kept(outputs: Path, tmp_path: Path) -> None:
    before, after = read_metrics(outputs / PLACE / METRICS), read_metrics(kept(outputs, tmp_path) / METRICS)
    assert [row for row in after if "val_loss" in row] == [row for row in before if "val_loss" in row]
    steps = [row for row in after if "loss" in row]
    assert 100 <= len(steps) < 200
    assert all(row in before for row in steps)


def test_nothing_of_the_machine_is_kept(outputs: Path, tmp_path: Path) -> None:
    run = kept(outputs, tmp_path)
    status = json.loads((run / "status.json").read_text())
    assert (status["host"], status["pid"]) == ("", 0)
    for path in run.rglob("*"):
        assert str(Path.home()) not in path.read_text()
    assert socket.gethostname() not in (run / "manifest.json").read_text()


def test_a_report_reads_the_records_as_it_reads_the_runs(outputs: Path, tmp_path: Path) -> None:
    kept(outputs, tmp_path)
    ours, theirs = ([row for row in oelm.load_runs(root) if row["state"] == "done"] for root in (tmp_path, outputs))
    assert len(ours) == 1
    assert {key: value for key, value in ours[0].items() if key != "path"} == {
        key: value for key, value in theirs[0].items() if key != "path"
    }


def test_a_run_with_an_edited_figure_is_named(outputs: Path, tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    shutil.copytree(outputs / PLACE, root / PLACE)
    stats = root / PLACE / "timing_stats.json"
    stats.write_text(json.dumps(json.loads(stats.read_text()) | {"best_ppl": 1.5}))
    told = keep_records(root, tmp_path / "kept", runs=find_runs(root, [])).remarks
    archived = make_archive(root, tmp_path / "a.tar.gz", runs=find_runs(root, []), weights=False).remarks
    for (remark,) in (told, archived):
        assert remark.startswith(f"{PLACE}: its record does not add up") and "best_ppl is 1.5" in remark


@pytest.mark.parametrize("left", ["status.json", METRICS])
def test_a_run_whose_config_is_gone_is_named(outputs: Path, tmp_path: Path, left: str) -> None:
    root, gone = tmp_path / "outputs", "GPT-02/smoke/default/seed-7"
    shutil.copytree(outputs / PLACE, root / PLACE)
    (root / gone).mkdir()
    shutil.copy(outputs / PLACE / left, root / gone / left)
    told = keep_records(root, tmp_path / "kept", runs=find_runs(root, [])).remarks
    archived = make_archive(root, tmp_path / "a.tar.gz", runs=find_runs(root, []), weights=False).remarks
    for (remark,) in (told, archived):
        assert remark.startswith(f"{gone}: left out, for its config.json is gone")


def test_keeping_again_changes_nothing(outputs: Path, tmp_path: Path) -> None:
    run = kept(outputs, tmp_path)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()}
    again = keep_records(outputs, tmp_path, runs=find_runs(outputs, []))
    assert (again.added, again.already_there) == ((), (PLACE,))
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()} == before


def test_another_run_at_the_same_place_is_refused_and_left_alone(outputs: Path, tmp_path: Path) -> None:
    run = kept(outputs, tmp_path)
    write_json(run / "timing_stats.json", {"best_ppl": 1.0})
    with pytest.raises(ArchiveError, match=r"timing_stats\.json: is that of another run; move .* aside"):
        keep_records(outputs, tmp_path, runs=find_runs(outputs, []))
    assert json.loads((run / "timing_stats.json").read_text()) == {"best_ppl": 1.0}


def test_what_a_sweep_found_is_kept_with_its_runs(outputs: Path, tmp_path: Path) -> None:
    sweep = outputs / "GPT-02" / "smoke" / "sweep.json"
    write_json(sweep, {"experiment": "GPT-02"})
    kept(outputs, tmp_path)
    assert (tmp_path / "GPT-02" / "smoke" / "sweep.json").read_bytes() == sweep.read_bytes()
    sweep.unlink()


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


def kept_sweep(root: Path, first: Scores, then: Scores, **chosen: Any) -> tuple[bytes, Path, Path, Kept]:
    """Keep a sweep, then another in its place; return the first's bytes, both files, and what came of the second."""
    target = root.parent / "results"
    before = write_scores(root, first).read_bytes()
    keep_records(root, target, runs=find_runs(root, []))
    ours = write_scores(root, then, **chosen)
    return before, ours, target / "GPT-02" / "smoke" / SWEEP, keep_records(root, target, runs=find_runs(root, []))


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
    assert there.read_bytes() == ours.read_bytes() != before


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
    keep_records(swept, target, runs=find_runs(swept, []))
    write_scores(swept, then)
    write_run(swept, "GPT-02", 1, Fate(ppl=21.0), budget="smoke")
    with pytest.raises(ArchiveError, match=r"results/GPT-02/smoke/sweep\.json: holds the point lr-0\.00\d, which .* lacks"):
        keep_records(swept, target, runs=find_runs(swept, []))
    assert (target / "GPT-02" / "smoke" / SWEEP).read_bytes() == before
    assert not (target / "GPT-02" / "smoke" / "default" / "seed-1").exists()


def test_a_sweep_that_was_taken_over_replaces_none_of_its_own(swept: Path) -> None:
    before, _, there, result = kept_sweep(swept, SWEPT | {0.004: None}, SWEPT, like="GPT-05")
    assert there.read_bytes() == before
    assert result.remarks == ("GPT-02/smoke/sweep.json: left as it was kept, for here it is only taken over from GPT-05",)


def test_a_sweep_of_its_own_replaces_one_that_was_taken_over(swept: Path) -> None:
    target = swept.parent / "results"
    write_scores(swept, SWEPT, like="GPT-05")
    keep_records(swept, target, runs=find_runs(swept, []))
    ours = write_scores(swept, {0.001: 2.2, 0.002: 2.1, 0.003: 2.3})
    keep_records(swept, target, runs=find_runs(swept, []))
    assert (target / "GPT-02" / "smoke" / SWEEP).read_bytes() == ours.read_bytes()


def test_a_sweep_that_was_only_concluded_again_leaves_the_file_alone(swept: Path) -> None:
    before, _, there, result = kept_sweep(swept, SWEPT, SWEPT, written="2026-02-03")
    assert there.read_bytes() == before and result.remarks == ()


def test_a_whole_sweep_stays_while_new_points_are_not_done(swept: Path) -> None:
    before, _, there, result = kept_sweep(swept, SWEPT, SWEPT | {0.008: None})
    assert there.read_bytes() == before
    assert result.remarks == ("GPT-02/smoke/sweep.json: left as it was kept, for the sweep has new points that are not done",)


def test_a_kept_sweep_that_cannot_be_read_is_not_overwritten(swept: Path) -> None:
    there = swept.parent / "results" / "GPT-02" / "smoke" / SWEEP
    write_json(there, {"experiment": "GPT-02"}, durable=False)
    write_scores(swept, SWEPT)
    with pytest.raises(ArchiveError, match=r"results/GPT-02/smoke/sweep\.json: is no record of a sweep"):
        keep_records(swept, swept.parent / "results", runs=find_runs(swept, []))


def test_a_classifiers_answers_are_kept_on_both_splits(tmp_path: Path) -> None:
    root, target = tmp_path / "outputs", tmp_path / "results"
    for experiment, accuracy in (("SST-2-01", 0.9), ("SST-2-02", 0.85)):
        write_arm(root, experiment, [accuracy] * 5, tests=[accuracy - 0.01 * seed for seed in SEEDS], data="sst2")
    keep_records(root, target, runs=find_runs(root, []))
    place = "SST-2-01/laptop/default/seed-0"
    for name in (PREDICTIONS["val"], PREDICTIONS["test"]):
        assert (target / place / name).read_bytes() == (root / place / name).read_bytes()
    # Else the comparison on test would lose its interval over examples.
    assert rows(english(target), "verdicts") == rows(english(root), "verdicts")


def test_a_language_models_documents_are_kept_on_both_splits(tmp_path: Path) -> None:
    run = write_run(tmp_path / "outputs", "GPT-02", 0, Fate(ppl=20.0, test=21.0), budget="smoke")
    keep_records(tmp_path / "outputs", tmp_path / "results", runs=[run])
    kept = tmp_path / "results" / run.relative_to(tmp_path / "outputs")
    for name in PREDICTIONS.values():
        assert (kept / name).read_bytes() == (run / name).read_bytes()


def test_the_command_says_what_it_wrote(outputs: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["archive", "GPT-02", "--out", str(outputs), "--records", str(tmp_path / "results")])
    assert said.exit_code == 0
    assert "1 run written to" in said.output.replace(os.linesep, " ")


def test_weights_are_not_for_records(outputs: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["archive", "--out", str(outputs), "--records", str(tmp_path), "--weights"])
    assert said.exit_code != 0
    assert not list(tmp_path.iterdir())
