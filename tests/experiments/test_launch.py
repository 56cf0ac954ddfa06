"""One run as one process: arguments arrive byte for byte, nothing is inherited, and every ending is told apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from oelm.errors import OelmError
from oelm.experiments.catalog import load_catalog
from oelm.experiments.plan import PlannedRun
from oelm.experiments.queue import ending, enqueue, is_busy, launch_lock, start, taken
from oelm.experiments.study import Study
from oelm.files import write_json
from oelm.runs.layout import CONSOLE
from oelm.runs.status import Progress, StatusName, now_text, read_status, status_now
from tests.faults.queues import write_catalog

STEPS = 60
NASTY = [
    "with space",
    "quote\"and'quote",
    "semi;colon && true | cat > x",
    "$(touch pwned) `touch pwned` $HOME ${HOME}",
    "ünïcödé 漢字 \U0001f9ea",
    "new\nline\ttab",
    "-rf",
    "--no-preflight",
    "*?[a]~%s%n{0}",
    "back\\slash",
]
# Prints what a process was given, as a run's process would find it.
ECHO = """\
import json, os, sys
given = {
    "arguments": [os.fsencode(word).hex() for word in sys.argv[1:]],
    "input": sys.stdin.buffer.read().hex(),
    "folder": os.getcwd(),
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "session": os.getsid(0) == os.getpid(),
    "handles": sorted(int(name) for name in os.listdir("/proc/self/fd")),
}
print(json.dumps(given))
"""


@pytest.fixture(scope="module")
def planned(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> PlannedRun:
    folder = write_catalog(tmp_path_factory.mktemp("catalog"), text_file)
    study = Study(names=("mine-01",), budget="smoke", root=Path("outputs"))
    return study.plan(load_catalog(folder / "experiments.yaml"))[0]


def placed(planned: PlannedRun, path: Path) -> PlannedRun:
    return PlannedRun(planned.experiment, planned.budget, planned.variant, planned.seed, planned.config, path)


def write_status(run: PlannedRun, name: StatusName, *, step: int = 7, message: str = "") -> None:
    row = status_now(name, Progress(step=step, steps=STEPS, loss=2.5), started=now_text(), message=message)
    write_json(run.path / "status.json", row.model_dump(mode="json"))


@pytest.fixture
def run(planned: PlannedRun, tmp_path: Path) -> PlannedRun:
    run = placed(planned, tmp_path / "mine-01" / "smoke" / "default" / "seed-0")
    run.path.mkdir(parents=True)
    return run


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a program that tells what it was given stand where Python is."""
    (tmp_path / "echo.py").write_text(ECHO)
    script = tmp_path / "echo"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{tmp_path}/echo.py" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def given(run: PlannedRun, *, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Start a run's process and return what it was given."""
    process = start(run, {"OMP_NUM_THREADS": "3"}, options=options)
    assert process.wait(timeout=60) == 0, (run.path / CONSOLE).read_text()
    found: dict[str, Any] = json.loads((run.path / CONSOLE).read_text())
    return found


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("name", [*NASTY, os.fsdecode(b"not utf-8: \xff\xfe")], ids=ascii)
def test_folder_and_config_arrive_byte_for_byte(
    name: str, planned: PlannedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The folder's name comes first in the argument, so that a dash of its own stands where an option's would.
    found = given(placed(planned, Path(name) / "seed-0"), options=("--track=wandb",))
    words = [bytes.fromhex(word) for word in found["arguments"]]
    assert words[-4:] == [b"work", b"--track=wandb", b"--", os.fsencode(f"{name}/seed-0")]
    assert json.loads(bytes.fromhex(found["input"])) == planned.config.as_dict()
    assert not (tmp_path / "pwned").exists()


@pytest.mark.usefixtures("echo")
def test_run_is_deaf_to_our_terminal_and_inherits_no_lock(run: PlannedRun, tmp_path: Path) -> None:
    lock = launch_lock(run, tmp_path)
    assert taken(lock)
    found = given(run)
    assert found["session"] and found["threads"] == "3"
    # Its three streams, and the one it reads this list by.
    assert found["handles"] == [0, 1, 2, 3]
    lock.release()


@pytest.mark.usefixtures("echo")
def test_what_a_run_prints_stands_behind_what_it_printed_before(run: PlannedRun) -> None:
    (run.path / CONSOLE).write_text("earlier\n")
    start(run, {}).wait(timeout=60)
    assert (run.path / CONSOLE).read_text().startswith("earlier\n{")


def test_process_that_cannot_be_started_is_told_in_words(run: PlannedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OelmError, match="no process can be started .*nowhere.*repeat the command"):
        start(run, {})


def test_process_that_ends_before_it_reads_its_config_is_told_by_its_exit_code(
    run: PlannedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert start(run, {}).wait(timeout=60) == 1


@pytest.mark.parametrize(
    ("said", "code", "asked", "state", "words"),
    [
        ("done", 0, False, "done", ""),
        # Killed in its last moments, or refused because another had finished it.
        ("done", -9, False, "done", ""),
        ("done", -15, True, "done", ""),
        ("done", 3, False, "done", ""),
        ("stopped", 75, True, "stopped", "the reason"),
        ("stopped", 75, False, "stopped", "the reason"),
        ("stopped", -15, True, "stopped", "the reason"),
        ("queued", -15, True, "stopped", "before it began"),
        ("queued", -15, False, "killed", "killed by SIGTERM"),
        ("running", -9, True, "killed", "killed by SIGKILL (by hand, or by the system when memory ran out)"),
        ("running", -7, False, "killed", "killed by SIGBUS (a data file shrank"),
        ("running", -11, False, "killed", "killed by SIGSEGV"),
        ("running", -35, False, "killed", "killed by signal 35"),
        ("failed", 3, False, "failed", "the reason"),
        ("failed", 1, True, "failed", "the reason"),
        ("running", 1, False, "failed", "last words"),
        ("queued", 2, False, "failed", "last words"),
    ],
)
def test_every_ending_is_told_apart(said: StatusName, code: int, asked: bool, state: str, words: str, run: PlannedRun) -> None:
    write_status(run, said, step=STEPS if said == "done" else 7, message="the reason" if said in ("stopped", "failed") else "")
    (run.path / CONSOLE).write_text("first words\nerror: last words\n\n")
    end = ending(run, code, asked=asked)
    assert end.state == state and words in end.message
    status = read_status(run.path)
    # A failure is noted by whoever can, at the step where the run is.
    assert status is not None and status.status == ("failed" if state == "failed" else said)
    assert status.step == (STEPS if said == "done" else 7) and status.loss == 2.5


def test_run_that_failed_without_a_word_still_says_how(run: PlannedRun) -> None:
    assert ending(run, 1).message == "exit code 1"
    status = read_status(run.path)
    assert status is not None and status.status == "failed" and status.message == "exit code 1"


def test_refused_process_of_a_run_in_other_hands_is_no_failure(run: PlannedRun) -> None:
    write_status(run, "running")
    with FileLock(run.path / ".lock"):
        assert ending(run, 3).state == "busy"
    status = read_status(run.path)
    assert status is not None and status.status == "running"


def test_launch_lock_is_free_again_as_soon_as_its_holder_is_killed(run: PlannedRun, tmp_path: Path) -> None:
    lock = launch_lock(run, tmp_path)
    hold = (
        f"import fcntl, os; fcntl.flock(os.open({lock.lock_file!r}, os.O_RDWR | os.O_CREAT), 2); print(1, flush=True); input()"
    )
    holder = subprocess.Popen([sys.executable, "-IS", "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None and holder.stdout is not None
    assert holder.stdout.readline() == b"1\n"
    assert not taken(lock)
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert taken(lock)
    assert not taken(launch_lock(run, tmp_path))
    lock.release()


def test_runs_of_one_root_have_locks_of_their_own(planned: PlannedRun, tmp_path: Path) -> None:
    names = ["a/smoke/default/seed-0", "a/smoke/default/seed-1", "a--smoke/smoke/default/seed-0", "a/smoke/x-12345678/seed-0"]
    locks = [launch_lock(placed(planned, tmp_path / name), tmp_path) for name in names]
    assert all(taken(lock) for lock in locks)
    for lock in locks:
        lock.release()


@pytest.mark.parametrize(
    ("said", "retry", "becomes"),
    [
        (None, False, "queued"),
        ("running", False, "queued"),
        ("stopped", False, "queued"),
        ("failed", False, "failed"),
        ("failed", True, "queued"),
        ("done", False, "done"),
        ("done", True, "done"),
    ],
)
def test_enqueued_run_keeps_what_it_has(
    said: StatusName | None, retry: bool, becomes: str, run: PlannedRun, tmp_path: Path
) -> None:
    if said is not None:
        write_status(run, said)
    enqueue(run, tmp_path, retry=retry)
    status = read_status(run.path)
    assert status is not None and status.status == becomes
    assert (status.step, status.loss) == ((0, None) if said is None else (7, 2.5))
    if becomes == "queued":
        assert json.loads((run.path / "config.json").read_text()) == run.config.as_dict()


def test_run_in_somebodys_hands_is_not_enqueued(run: PlannedRun, tmp_path: Path) -> None:
    write_status(run, "stopped")
    with FileLock(run.path / ".lock"):
        assert is_busy(run.path)
        enqueue(run, tmp_path, retry=True)
    lock = launch_lock(run, tmp_path)
    assert taken(lock)
    enqueue(run, tmp_path, retry=True)
    lock.release()
    status = read_status(run.path)
    assert status is not None and status.status == "stopped" and not is_busy(run.path)


def test_asking_whether_a_run_is_busy_leaves_no_folder_behind(planned: PlannedRun, tmp_path: Path) -> None:
    assert not is_busy(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
