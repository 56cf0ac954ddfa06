"""Real jobs through a real SLURM: run by `make test-slurm`, which starts one on this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oelm.experiments.slurm import job_states, read_submissions
from oelm.files import write_json
from oelm.train.status import read_status
from tests.cli.test_many import DIVERGING
from tests.faults.harness import evidence
from tests.faults.queues import write_catalog

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("oelm-slurm-" not in os.environ.get("SLURM_CONF", ""), reason="no SLURM of ours; make test-slurm"),
]
LIMIT_S = 400.0
# Long enough to be caught in the middle.
LONG = ("--set", "steps=1500", "--set", "save_every=1500", "--set", "eval_every=1500", "--seeds", "0-0", "--no-baseline")


@pytest.fixture
def place(text_file: Path, tmp_path: Path) -> Path:
    folder = write_catalog(tmp_path / "place", text_file)
    (folder / "slurm.yaml").write_text("partition: main\narray_limit: 2\ngrace_s: 30\n")
    return folder


def oelm(place: Path, *arguments: str, code: int = 0) -> str:
    """Run a command in the place's folder; return all that it printed."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "oelm", *arguments], cwd=place, capture_output=True, text=True, timeout=LIMIT_S
    )
    printed = done.stdout + done.stderr
    assert done.returncode == code and "Traceback" not in printed, printed
    return " ".join(printed.split())


def wait_for(condition: Callable[[], bool], place: Path) -> None:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > LIMIT_S:
            logs = {path.name: path.read_text()[-1500:] for path in place.glob("outputs/.slurm/*/*.log")}
            queue = subprocess.run(["squeue"], capture_output=True, text=True).stdout
            raise AssertionError(f"waited in vain: {queue} {logs}")
        time.sleep(0.3)


def run_folder(place: Path, name: str, seed: int = 0) -> Path:
    (folder,) = place.glob(f"outputs/{name}/smoke/*/seed-{seed}")
    return folder


def says(run: Path, word: str, *, from_step: int = 0) -> bool:
    status = read_status(run)
    return status is not None and status.status == word and status.step >= from_step


def state_of(place: Path, run: Path) -> str:
    states = job_states(place / "outputs", [run])
    return states[run].state if run in states else ""


def test_array_of_runs_after_its_data_and_before_its_report(place: Path) -> None:
    said = oelm(place, "run", "mine", "--budget", "smoke", "--seeds", "2", "--slurm", "--time", "30")
    assert "submitted 4 runs as job" in said
    (record,) = read_submissions(place / "outputs")
    assert len(record.members) == 4 and "queued" in oelm(place, "status")
    runs = [place / "outputs" / name for name in record.members]
    wait_for(lambda: all(says(run, "done") for run in runs), place)
    wait_for(lambda: (place / "outputs" / "report.html").is_file(), place)
    wait_for(lambda: all(state_of(place, run) == "COMPLETED" for run in runs), place)
    assert "4 runs: 4 done" in oelm(place, "status")
    assert "nothing to submit" in oelm(place, "run", "mine", "--budget", "smoke", "--seeds", "2", "--slurm")


def test_job_near_its_time_limit_is_queued_again_and_continues_bit_for_bit(place: Path, tmp_path: Path) -> None:
    oelm(place, "run", "mine-02", "--budget", "smoke", *LONG, "--slurm")
    run = run_folder(place, "mine-02")
    wait_for(lambda: says(run, "running", from_step=20), place)
    # What SLURM itself sends before the limit, to the script alone.
    job = job_states(place / "outputs", [run])[run].job
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    wait_for(lambda: says(run, "stopped", from_step=20), place)
    stopped = read_status(run)
    assert stopped is not None and 20 <= stopped.step < 1500
    wait_for(lambda: says(run, "done"), place)
    assert list(run.glob("checkpoints/step-*")) and "continuing from" in (run / "training.log").read_text()
    logs = "".join(path.read_text() for path in place.glob("outputs/.slurm/*/run-*.log"))
    assert "near the time limit: saved, queued again" in logs
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    config = json.loads((run / "config.json").read_text())
    write_json(tmp_path / "config.json", config)
    places = ["--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "oracle")]
    command = [sys.executable, "-m", "oelm", "train", *places]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert evidence(run) == evidence(tmp_path / "oracle")


def test_job_requeued_by_slurm_itself_continues(place: Path) -> None:
    oelm(place, "run", "mine-01", "--budget", "smoke", *LONG, "--slurm")
    run = run_folder(place, "mine-01")
    wait_for(lambda: says(run, "running", from_step=20), place)
    # As a preempted job is: SLURM sends TERM, ends it, and queues it again.
    subprocess.run(["scontrol", "requeue", job_states(place / "outputs", [run])[run].job], check=True)
    wait_for(lambda: "continuing from" in (run / "training.log").read_text(), place)
    wait_for(lambda: says(run, "done"), place)


def test_failing_run_fails_alone_and_says_why(place: Path) -> None:
    with (place / "experiments.yaml").open("a") as catalog:
        catalog.write(DIVERGING.replace("NAME", "mine-03"))
    oelm(place, "run", "mine-01", "mine-03", "--budget", "smoke", "--seeds", "1", "--slurm")
    good, bad = run_folder(place, "mine-01"), run_folder(place, "mine-03")
    wait_for(lambda: says(bad, "failed") and says(good, "done"), place)
    wait_for(lambda: state_of(place, bad) == "FAILED", place)
    shown = oelm(place, "status")
    assert "FAILED" in shown and "NonFiniteError" in shown
    assert "submitted 1 run as" in oelm(place, "run", "mine-03", "--budget", "smoke", "--seeds", "1", "--slurm", "--retry")


def test_stopped_runs_save_and_waiting_ones_are_taken_off_slurms_queue(place: Path) -> None:
    long = [word for word in LONG if word not in ("--seeds", "0-0")]
    settings = (place / "slurm.yaml").read_text()
    (place / "slurm.yaml").write_text(settings.replace("array_limit: 2", "array_limit: 1"))
    oelm(place, "run", "mine-01", "--budget", "smoke", *long, "--seeds", "3", "--slurm")
    first = run_folder(place, "mine-01")
    wait_for(lambda: says(first, "running", from_step=20), place)
    said = oelm(place, "stop", "mine-01", "--timeout", "120")
    assert "asked to end" in said
    assert says(first, "stopped", from_step=20)
    wait_for(lambda: all(state_of(place, run_folder(place, "mine-01", seed)) == "CANCELLED" for seed in (1, 2)), place)
    wait_for(lambda: state_of(place, first) == "FAILED", place)
    # The same command submits what is left, and it continues.
    (place / "slurm.yaml").write_text(settings)
    again = oelm(place, "run", "mine-01", "--budget", "smoke", *long, "--seeds", "3", "--slurm")
    assert "submitted 3 runs" in again
    wait_for(lambda: all(says(run_folder(place, "mine-01", seed), "done") for seed in (0, 1, 2)), place)
    assert "continuing from" in (first / "training.log").read_text()


def test_mistakes_are_told_before_anything_is_submitted(place: Path) -> None:
    smoke = ("run", "mine-01", "--budget", "smoke", "--slurm")
    assert "no such partition (did you mean 'main'?)" in oelm(place, *smoke, "--partition", "mian", code=2)
    said = oelm(place, *smoke, "--set", "steps=2000000", "--set", "save_every=2000000", "--time", "1", code=2)
    assert "--time 1 is 60 s; from one checkpoint to the next" in said
    settings = (place / "slurm.yaml").read_text()
    (place / "slurm.yaml").write_text(f"{settings}gres: gpu:7\n")
    refused = oelm(place, *smoke, code=3)
    (place / "slurm.yaml").write_text(settings)
    assert "sbatch refused" in refused and "nothing of this submission is left in the queue" in refused
    too_long = oelm(place, *smoke, "--partition", "short", "--time", "99-0", "--no-preflight", code=0)
    assert "submitted" in too_long
    (record,) = read_submissions(place / "outputs")
    subprocess.run(["scancel", record.data_job, record.runs_job, record.report_job], check=True)
    left = subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout
    assert "oelm" not in left or record.runs_job in left
