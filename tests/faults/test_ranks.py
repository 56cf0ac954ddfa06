"""Processes of a run that are killed, suspended or starved: the others end, the files are whole, and the run goes on."""

from __future__ import annotations

import contextlib
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from oelm.config import RunConfig
from oelm.runs.rundir import RunDir
from oelm.runs.status import read_status
from oelm.train.checkpoint import Checkpoints
from tests.faults.harness import evidence, leftovers
from tests.train.rank_worker import by_torchrun, forked, run_forked, told
from tests.train.test_dist import wide

PATIENCE_S = 3.0
MARGIN_S = 5.0


@pytest.fixture(scope="module")
def config(text_file: Path) -> RunConfig:
    return wide(text_file, model__dropout=0.1)


@pytest.fixture(scope="module")
def oracle(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes that nobody disturbed come to."""
    run = tmp_path_factory.mktemp("oracle") / "run"
    run_forked(config, run, 2)
    return evidence(run)


def disturb(config: RunConfig, run: Path, fault: str, *, patience_s: float = 60.0) -> tuple[list[int | None], float]:
    """Run with a fault until all have ended; return the exit codes, and the seconds since the first died or was suspended."""
    with forked(config, run, 2, fault=fault, timeout_s=patience_s) as children:
        first: float | None = None
        began = time.monotonic()
        while time.monotonic() - began < 90.0:
            ended = [child for child in children if child.exitcode is not None]
            if first is None and (ended or any(map(is_suspended, children))):
                first = time.monotonic()
            if len(ended) == len(children):
                break
            time.sleep(0.005)
        assert first is not None
        return [child.exitcode for child in children], time.monotonic() - first


def is_suspended(child: ForkServerProcess) -> bool:
    """Whether the system has stopped a process, which is then neither running nor gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def assert_goes_on(config: RunConfig, run: Path, oracle: dict[str, Any]) -> None:
    """Check that nothing torn is there, and that the same command on the same two processes ends as if undisturbed."""
    assert Checkpoints(run, keep=2).newest(exact_step=None) is not None
    run_forked(config, run, 2)
    assert evidence(run) == oracle
    with RunDir(run):
        assert leftovers(run) == []


@pytest.mark.parametrize(
    "fault",
    [
        "rank 1 killed",
        pytest.param("writer killed", marks=pytest.mark.slow),
        "writer killed while saving",
        pytest.param("rank 1 killed while saving", marks=pytest.mark.slow),
    ],
)
def test_survivor_of_a_killed_process_ends_at_once_and_the_run_goes_on(
    fault: str, config: RunConfig, oracle: dict[str, Any], tmp_path: Path
) -> None:
    codes, seconds = disturb(config, tmp_path / "run", fault)
    assert sorted(codes, key=str) == [-9, 75]
    assert seconds < MARGIN_S
    (end,) = told(tmp_path / "run", "end")
    assert end["error"] == "RankLostError" and "resume from the last checkpoint" in end["message"]
    status = read_status(tmp_path / "run")
    # Of a killed writer nobody could write down how it ended; its lock tells.
    assert status is not None and status.status == ("running" if "writer" in fault else "stopped")
    assert_goes_on(config, tmp_path / "run", oracle)


@pytest.mark.slow
def test_others_leave_a_suspended_process_after_their_patience(
    config: RunConfig, oracle: dict[str, Any], tmp_path: Path
) -> None:
    codes, seconds = disturb(config, tmp_path / "run", "rank 1 suspended", patience_s=PATIENCE_S)
    # The survivor lets the suspended one go on as it leaves, so that both are out.
    assert codes == [75, 75]
    assert PATIENCE_S - 1.0 < seconds < PATIENCE_S + MARGIN_S
    status = read_status(tmp_path / "run")
    assert status is not None and status.status == "stopped"
    assert_goes_on(config, tmp_path / "run", oracle)


@pytest.mark.slow
def test_writer_may_take_longer_than_the_others_patience(config: RunConfig, oracle: dict[str, Any], tmp_path: Path) -> None:
    run_forked(config, tmp_path / "run", 2, fault="slow saves", timeout_s=PATIENCE_S)
    assert evidence(tmp_path / "run") == oracle


@pytest.mark.slow
def test_the_others_may_take_longer_than_the_writers_patience_to_open_their_data(
    config: RunConfig, oracle: dict[str, Any], tmp_path: Path
) -> None:
    run_forked(config, tmp_path / "run", 2, fault="rank 1 slow to open", timeout_s=PATIENCE_S)
    assert evidence(tmp_path / "run") == oracle


def test_a_process_killed_while_it_opens_its_data_is_noticed_at_once(config: RunConfig, tmp_path: Path) -> None:
    codes, seconds = disturb(config, tmp_path / "run", "rank 1 killed while opening")
    assert codes == [75, -9] and seconds < MARGIN_S
    (end,) = told(tmp_path / "run", "end")
    assert end["error"] == "RankLostError"


def test_what_one_process_finds_wrong_with_its_data_all_are_told(config: RunConfig, tmp_path: Path) -> None:
    codes, seconds = disturb(config, tmp_path / "run", "rank 1 finds other data")
    assert codes == [3, 3] and seconds < MARGIN_S
    assert all("train.bin: not what was recorded" in end["message"] for end in told(tmp_path / "run", "end"))


def test_full_disk_stops_all_alike_and_the_run_goes_on(config: RunConfig, oracle: dict[str, Any], tmp_path: Path) -> None:
    codes, _ = disturb(config, tmp_path / "run", "disk full")
    assert codes == [75, 75]
    assert len({end["message"] for end in told(tmp_path / "run", "end")}) == 1
    assert "no room to write" in told(tmp_path / "run", "end")[1]["message"]
    assert_goes_on(config, tmp_path / "run", oracle)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["rank 1 killed", "writer killed", "rank 1 suspended"])
def test_torchrun_begins_again_by_itself_after_a_lost_process(
    fault: str, config: RunConfig, oracle: dict[str, Any], tmp_path: Path
) -> None:
    with by_torchrun(config, tmp_path / "run", 2, restarts=1, fault=fault, timeout_s=PATIENCE_S) as process:
        printed, _ = process.communicate(timeout=240)
    assert process.returncode == 0, printed
    assert [row["attempt"] for row in told(tmp_path / "run", "start")] == [1, 1]
    assert evidence(tmp_path / "run") == oracle
