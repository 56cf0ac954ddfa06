"""A disk that fills in the middle of any file of a run: exit code 75, path and free bytes named, status not left running."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from oelm.errors import DiskFullError
from oelm.runs.rundir import RunDir
from oelm.runs.status import Progress, read_status, status_now, write_status
from tests.conftest import tiny_settings
from tests.faults.harness import evidence, finish, leftovers, start, wait_for
from tests.faults.tally import Tally
from tests.faults.test_starved import small_disk


@pytest.fixture(scope="module")
def settings(text_file: Path) -> dict[str, Any]:
    """Few saves, so that many rows of metrics lie between two of them."""
    return tiny_settings(text_file, steps=60, eval_every=60, save_every=5)


@pytest.fixture(scope="module")
def oracle(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("oracle") / "run"
    finish(settings, out)
    return out


def check_stopped(run: Path, name: str, told: str) -> None:
    """The error names the file and the free bytes, and the status says that the run stopped, and why."""
    status = read_status(run)
    assert re.search(rf"no room to write {re.escape(str(run))}/{name} .*[\d,]+ bytes free", told), told
    assert status is not None and status.status == "stopped"
    assert status.message == f"DiskFullError: {told}"


def filled(disk: Path) -> Path:
    """Take all the room of a disk, as somebody else's file; return that file."""
    filler = disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(disk).free))
    return filler


def use_up_names(folder: Path) -> None:
    with pytest.raises(OSError):
        for number in range(1000):
            (folder / str(number)).touch()


def test_metrics_that_find_no_room_stop_the_run_resumable(
    settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    told, sign, held = tmp_path / "told", tmp_path / "resting", tmp_path / "held"
    mine = {**settings, "save_every": 50}
    with small_disk(tmp_path / "disk", 16 * 2**20) as disk:
        run = disk / "run"
        child = start(mine, run, told=str(told), rest_in="step", rest_at=9, phase=str(sign), rest_while=str(held))
        wait_for(sign.exists, child)
        filler = filled(disk)
        held.unlink()
        child.join(timeout=60)
        assert child.exitcode == 75
        # Under load a heartbeat may come first.
        check_stopped(run, r"(metrics.jsonl|status.json)", told.read_text())
        filler.unlink()
        finish(mine, run)
        assert evidence(run) == evidence(oracle)
    tally("R4", "disks full in the middle of metrics, of a log, of names and of a lock", held=1, of=1)


def test_metrics_beyond_a_file_size_limit_stop_the_run_resumable(
    settings: dict[str, Any], oracle: Path, tmp_path: Path
) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    # Room for every other small file, and for some of the rows.
    limit = (oracle / "tokenizer.json").stat().st_size + 100
    mine = {**settings, "steps": 200, "save_every": 200, "eval_every": 200}
    child = start(mine, run, file_bytes=limit, told=str(told), preflight=False)
    child.join(timeout=60)
    assert child.exitcode == 75
    check_stopped(run, "metrics.jsonl", told.read_text())


def test_a_log_that_finds_no_room_stops_the_run_resumable(
    settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    run, told = tmp_path / "run", tmp_path / "told"
    run.mkdir()
    (run / ".lock").touch()
    # A device that lets itself be opened and is full.
    (run / "training.log").symlink_to("/dev/full")
    child = start(settings, run, told=str(told))
    child.join(timeout=60)
    assert child.exitcode == 75
    check_stopped(run, "training.log", told.read_text())
    (run / "training.log").unlink()
    finish(settings, run)
    assert evidence(run) == evidence(oracle)
    tally("R4", "disks full in the middle of metrics, of a log, of names and of a lock", held=1, of=1)


def test_a_disk_without_room_for_one_more_name_stops_the_run_resumable(
    settings: dict[str, Any], oracle: Path, tmp_path: Path, tally: Tally
) -> None:
    told, sign, held = tmp_path / "told", tmp_path / "resting", tmp_path / "held"
    with small_disk(tmp_path / "disk", 16 * 2**20, files=100) as disk:
        run, others = disk / "run", disk / "others"
        empty = disk / "empty"
        others.mkdir()
        empty.mkdir()
        child = start(settings, run, told=str(told), rest_in="step", rest_at=9, phase=str(sign), rest_while=str(held))
        wait_for(sign.exists, child)
        use_up_names(others)
        held.unlink()
        child.join(timeout=60)
        assert child.exitcode == 75
        check_stopped(run, r"checkpoints/\S+", told.read_text())
        assert leftovers(run) == []
        use_up_names(others)
        with pytest.raises(DiskFullError, match=r"no room to write .*/\.lock .* bytes free"), RunDir(empty):
            pass
        shutil.rmtree(others)
        finish(settings, run)
        assert evidence(run) == evidence(oracle)
    tally("R4", "disks full in the middle of metrics, of a log, of names and of a lock", held=1, of=1)


@pytest.mark.parametrize("message", ["a reason", "a long reason of \u00fc " * 1000])
def test_a_status_on_a_full_disk_says_how_the_run_ended_in_the_room_it_has(message: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2**20) as disk:
        progress = Progress(step=3, steps=9, loss=2.5)
        write_status(disk, status_now("running", progress, started="then", message="starting"))
        filled(disk)
        with pytest.raises(DiskFullError):
            write_status(disk, status_now("running", progress, started="then"))
        write_status(disk, status_now("stopped", progress, started="then", message=message))
        status = read_status(disk)
        assert status is not None and (status.status, status.step) == ("stopped", 3)
        assert status.message and message.startswith(status.message)
        assert leftovers(disk) == []
