"""Records for a repository: what a report needs of finished runs, small, without weights or a trace of the machine."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

import oelm
from oelm.cli.app import app
from oelm.errors import ArchiveError
from oelm.experiments.collect import find_runs
from oelm.experiments.keep import METRICS, keep_records
from oelm.files import write_json
from oelm.train.metrics import read_metrics
from tests.conftest import run_here, tiny_config
from tests.experiments.recorded import record

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


def test_the_command_says_what_it_wrote(outputs: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["archive", "GPT-02", "--out", str(outputs), "--records", str(tmp_path / "results")])
    assert said.exit_code == 0
    assert "1 runs written to" in said.output.replace(os.linesep, " ")


def test_weights_are_not_for_records(outputs: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["archive", "--out", str(outputs), "--records", str(tmp_path), "--weights"])
    assert said.exit_code != 0
    assert not list(tmp_path.iterdir())
