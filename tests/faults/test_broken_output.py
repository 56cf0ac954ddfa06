"""Commands whose standard output breaks: what trains is saved, the exit code is 75, and the same command goes on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.data.prepare import prepare
from oelm.experiments.catalog import load_catalog
from oelm.experiments.study import Study
from oelm.runs.layout import CONSOLE
from oelm.runs.metrics import read_metrics
from oelm.runs.status import read_status
from tests.conftest import oelm_command
from tests.faults.queues import write_catalog
from tests.faults.tally import Tally

STEPS = 30


@pytest.fixture(scope="module", autouse=True)
def _prepared(text_file: Path) -> None:
    """A stop while data is prepared leaves no run to look at."""
    prepare(str(text_file), tokenizer="bpe:300")


def training(text: Path, run: Path) -> list[str]:
    sizes = {"steps": STEPS, "eval_every": 5, "save_every": 10, "data.tokenizer": "bpe:300", "model.seq_len": 16}
    options = [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")]
    return oelm_command("train", "--budget", "smoke", "--text", str(text), "--out", str(run), *options)


def check_saved(run: Path, reason: str) -> None:
    status = read_status(run)
    assert status is not None and status.status == "stopped" and reason in status.message
    assert json.loads((run / "latest.json").read_text())["step"] == status.step


def test_a_run_whose_reader_leaves_is_saved_and_goes_on(text_file: Path, tmp_path: Path, tally: Tally) -> None:
    """What `oelm train ... | head -1` does."""
    run = tmp_path / "run"
    process = subprocess.Popen(training(text_file, run), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("run directory")
    process.stdout.close()
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 75
    assert "standard output cannot be written" in told and "Traceback" not in told and "Exception" not in told
    check_saved(run, "Broken pipe")
    assert CliRunner().invoke(app, training(text_file, run)[3:]).exit_code == 0
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row] == list(range(1, STEPS + 1))
    tally("R8", "outputs that broke", held=1, of=1)


def test_a_run_whose_output_is_full_is_saved(text_file: Path, tmp_path: Path, tally: Tally) -> None:
    run = tmp_path / "run"
    with open("/dev/full", "w") as full:
        ended = subprocess.run(training(text_file, run), stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 75 and "/dev/full cannot be written" in ended.stderr
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr
    check_saved(run, "bytes free on that disk")
    tally("R8", "outputs that broke", held=1, of=1)


def test_a_run_of_a_queue_whose_console_log_is_full_is_stopped_and_not_failed(
    text_file: Path, tmp_path: Path, tally: Tally
) -> None:
    folder = write_catalog(tmp_path / "mine", text_file)
    study = Study(names=("mine-01",), budget="smoke", root=folder / "outputs")
    run = study.plan(load_catalog(folder / "experiments.yaml"))[0].path
    run.mkdir(parents=True)
    (run / CONSOLE).symlink_to("/dev/full")
    command = oelm_command("run", "mine-01", "--budget", "smoke", "--seeds", "1", "--jobs", "1", "--out", "outputs")
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 75, ended.stdout + ended.stderr
    assert "stopped at step" in ended.stdout and "failed" not in ended.stdout + ended.stderr
    check_saved(run, "/dev/full cannot be written")
    tally("R4", "a full console.log in a queue", held=1, of=1)


def test_a_command_that_trains_nothing_ends_in_words() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(oelm_command("list"), stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 3 and ended.stderr.startswith("error: standard output /dev/full cannot be written")
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr
