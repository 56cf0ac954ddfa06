"""What a run is doing is told from outside, truly and without touching it: alive, silent, dead, or ended and how."""

from __future__ import annotations

import datetime
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from oelm.errors import ConfigError, RunDirError
from oelm.runs.find import choose, look, look_at, scan
from oelm.runs.layout import LOCK
from oelm.runs.status import State, Status, decide, parse_locks, read_locks, silent_s
from tests.cases import case
from tests.experiments.recorded import record, status_of

HERE = socket.gethostname()
# A process that holds a run as a training process does, and says so on its output.
HOLDER = """
import sys, time, filelock
with filelock.FileLock(sys.argv[1], timeout=0):
    print("held", flush=True)
    time.sleep(60)
"""
# A run that is started and done again and again, with some rest in between.
LIVES = """
import sys, time, filelock
from pathlib import Path
from typing import Any
from tests.experiments.recorded import record
for turn in range(80):
    with filelock.FileLock(sys.argv[2], timeout=0):
        record(Path(sys.argv[1]), "running", message=str(turn))
        time.sleep(0.005)
        record(Path(sys.argv[1]), "done", message=str(turn))
    time.sleep(0.005)
"""
WATCHER = """
import sys
from pathlib import Path
from typing import Any
from oelm.runs.find import scan
while True:
    scan(Path(sys.argv[1]))
"""
Holding = Callable[[Path], subprocess.Popen[str]]


@pytest.fixture
def holding() -> Iterator[Holding]:
    started: list[subprocess.Popen[str]] = []

    def start(run: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run / LOCK)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ago(seconds: float) -> str:
    return (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)).isoformat(timespec="seconds")


def state_of(root: Path) -> State:
    (view,) = scan(root)
    return view.state


# What it says, whether its lock is held, silent for how long, of this host: what it is.
DECISIONS: list[tuple[Any, bool | None, float, bool, State]] = [
    ("running", True, 1, True, "running"),
    ("running", True, 1000, True, "stale"),
    ("running", False, 1, True, "dead"),
    ("running", False, 1000, True, "dead"),
    ("running", None, 1, True, "running"),
    ("running", None, 1000, True, "stale"),
    # No lock of another host is ever seen here: that it is not held says nothing.
    ("running", False, 1, False, "running"),
    ("running", None, 1, False, "running"),
    ("running", False, 1000, False, "stale"),
    ("running", None, 1000, False, "stale"),
    ("running", True, 1000, False, "stale"),
    # A clock set back puts the last sign of life into the future.
    ("running", True, -1e6, True, "running"),
    ("running", None, -1e6, False, "running"),
    ("running", None, math.inf, True, "stale"),
    ("queued", None, 1e9, True, "queued"),
    ("queued", True, 1, True, "queued"),
    ("stopped", None, 1e9, True, "stopped"),
    ("stopped", True, 1, True, "stopped"),
    ("failed", False, 1, True, "failed"),
    ("done", None, 1e9, False, "done"),
    ("done", False, 1, True, "done"),
    ("", None, math.inf, True, "damaged"),
    ("", False, math.inf, True, "damaged"),
    # Somebody is in it: about to write its first status, or the next after a damaged one.
    ("", True, math.inf, True, "running"),
]


def test_the_state_follows_from_words_lock_silence_and_host() -> None:
    for said, held, age, same_host, state in DECISIONS:
        with case(said, held, age, same_host, state):
            status = status_of(said) if said else None
            assert decide(status, held=held, age_s=age, same_host=same_host) == state


@pytest.mark.parametrize(
    ("step_s", "age", "state"), [(0.1, 31, "stale"), (20.0, 150, "running"), (20.0, 201, "stale"), (None, 100, "running")]
)
def test_a_run_of_long_steps_may_be_silent_for_longer(step_s: float | None, age: float, state: State) -> None:
    assert decide(status_of("running", step_s=step_s), held=True, age_s=age, same_host=True) == state


def test_a_heartbeat_that_is_no_time_is_long_ago() -> None:
    for heartbeat in ("", "yesterday", "0001-01-01T00:00:00", "9999-99-99", "2026-01-01T00:00:00+99:99"):
        with case(heartbeat):
            assert silent_s(status_of("running", heartbeat=heartbeat), now=time.time()) > 1e9


def test_a_heartbeat_from_the_future_is_fresh(tmp_path: Path, holding: Holding) -> None:
    run = record(tmp_path, "running", heartbeat=ago(-86400))
    holding(run)
    assert state_of(tmp_path) == "running"


def test_a_run_is_running_stale_and_dead_with_its_process(tmp_path: Path, holding: Holding) -> None:
    run = record(tmp_path, "running", heartbeat=ago(0))
    process = holding(run)
    assert state_of(tmp_path) == "running"
    process.send_signal(signal.SIGSTOP)
    record(tmp_path, "running", heartbeat=ago(60))
    assert state_of(tmp_path) == "stale"
    process.kill()
    process.wait()
    assert state_of(tmp_path) == "dead"


def test_a_dead_runs_number_in_use_by_another_process_revives_nothing(tmp_path: Path) -> None:
    record(tmp_path, "running", heartbeat=ago(0), pid=os.getpid())
    assert state_of(tmp_path) == "dead"


def test_a_run_of_another_host_is_never_called_dead(tmp_path: Path) -> None:
    record(tmp_path, "running", heartbeat=ago(0), host="elsewhere")
    assert state_of(tmp_path) == "running"
    record(tmp_path, "running", heartbeat=ago(7200), host="elsewhere")
    assert state_of(tmp_path) == "stale"


def test_a_run_that_ends_while_it_is_looked_at_never_seems_dead(tmp_path: Path) -> None:
    run = record(tmp_path, "queued")
    # Read after it and before the locks, so that there is time enough to end in between.
    for seed in range(200):
        record(tmp_path, "done", experiment="later", seed=seed)
    process = subprocess.Popen([sys.executable, "-c", LIVES, str(tmp_path), str(run / LOCK)], cwd=Path(__file__).parents[2])
    seen = set()
    while process.poll() is None:
        seen.add(scan(tmp_path)[0].state)
    assert process.returncode == 0 and seen <= {"queued", "running", "done"} and "done" in seen


def test_looking_never_keeps_a_run_from_starting(tmp_path: Path) -> None:
    run = record(tmp_path, "running", heartbeat=ago(0))
    (run / LOCK).touch()
    watcher = subprocess.Popen([sys.executable, "-c", WATCHER, str(tmp_path)])
    try:
        for _ in range(500):
            with FileLock(run / LOCK, timeout=0):
                time.sleep(0.001)
    finally:
        watcher.kill()
        watcher.wait()


def test_looking_changes_nothing(tmp_path: Path) -> None:
    for said in ("queued", "running", "done"):
        record(tmp_path, said, variant=said)

    def shape() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    before = shape()
    assert len(scan(tmp_path)) == 3
    assert shape() == before


def test_runs_come_in_the_order_of_their_names_and_numbers(tmp_path: Path) -> None:
    for seed in (10, 2, 0):
        record(tmp_path, "done", seed=seed)
    record(tmp_path, "done", experiment="GPT-01")
    assert [view.name for view in scan(tmp_path)] == [
        "GPT-01/smoke/default/seed-0",
        *(f"GPT-02/smoke/default/seed-{seed}" for seed in (0, 2, 10)),
    ]


def test_only_the_experiments_asked_for_are_read(tmp_path: Path) -> None:
    record(tmp_path, "done")
    record(tmp_path, "done", experiment="GPT-01")
    assert [view.experiment for view in scan(tmp_path, only=["GPT-01"])] == ["GPT-01"]


def test_what_is_no_run_is_passed_over(tmp_path: Path) -> None:
    outside = record(tmp_path / "outside", "done").parents[2]
    root = tmp_path / "root"
    real = record(root, "done")
    (root / "linked").symlink_to(outside)
    (root / "GPT-02" / "linked").symlink_to(outside / "smoke")
    (real.parent / "seed-7").symlink_to(real)
    for name in (
        "GPT-02/smoke/default/seed-01",
        "GPT-02/smoke/default/seed--1",
        "GPT-02/smoke/default/notes",
        ".launch/a/b/seed-0",
    ):
        (root / name).mkdir(parents=True)
        (root / name / "status.json").write_text("{}")
    (root / "GPT-02/smoke/empty/seed-0").mkdir(parents=True)
    (root / "a b/smoke/default/seed-0").mkdir(parents=True)
    (root / "a b/smoke/default/seed-0/config.json").write_text("{}")
    (root / "file").write_text("x")
    assert [view.path for view in scan(root)] == [real]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"status": "done"}', b"\xff\xfe", b"[" * 100_000, b'"\\ud800"'])
def test_a_status_that_cannot_be_read_is_damaged_and_no_crash(tmp_path: Path, content: bytes) -> None:
    (record(tmp_path, "done") / "status.json").write_bytes(content)
    assert state_of(tmp_path) == "damaged"


def test_a_run_killed_before_its_first_status_is_damaged(tmp_path: Path) -> None:
    (record(tmp_path, "done") / "status.json").unlink()
    assert state_of(tmp_path) == "damaged"


def test_a_long_message_is_read_whole(tmp_path: Path) -> None:
    record(tmp_path, "failed", message="x" * 50_000)
    (view,) = scan(tmp_path)
    assert view.status is not None and len(view.status.message) == 50_000


def test_no_folder_has_no_runs_and_a_file_is_refused(tmp_path: Path) -> None:
    assert scan(tmp_path / "gone") == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunDirError, match="is a file"):
        scan(tmp_path / "file")


def test_one_run_is_looked_at_wherever_it_is(tmp_path: Path) -> None:
    run = record(tmp_path, "stopped", seed=3)
    view = look_at(run)
    assert (view.name, view.state) == ("GPT-02/smoke/default/seed-3", "stopped")
    record(tmp_path, "done", seed=3)
    assert look(view).state == "done"
    assert look_at(tmp_path / "nowhere").state == "damaged"


TABLE = """\
1: FLOCK  ADVISORY  WRITE 100 fe:00:11 0 EOF
1: -> FLOCK  ADVISORY  WRITE 101 fe:00:11 0 EOF
2: POSIX  ADVISORY  WRITE 102 fe:00:12 0 EOF
3: OFDLCK ADVISORY  READ -1 00:05:13 0 0
4: FLOCK  ADVISORY  WRITE 103 08:1f:11 0 EOF
5: torn
"""


def test_the_table_of_locks_gives_holders_and_not_those_who_wait() -> None:
    assert parse_locks(TABLE).holders == {11: [((0xFE, 0), 100), ((8, 0x1F), 103)]}


def test_a_lock_is_matched_by_device_or_by_the_recorded_process(tmp_path: Path) -> None:
    lock = tmp_path / LOCK
    lock.touch()
    facts = lock.stat()
    device = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}"
    same = parse_locks(f"1: FLOCK  ADVISORY  WRITE 100 {device}:{facts.st_ino} 0 EOF\n")
    other = parse_locks(f"1: FLOCK  ADVISORY  WRITE 100 77:77:{facts.st_ino} 0 EOF\n")
    assert same.holder(lock, expected=None) == 100
    assert other.holder(lock, expected=None) is None and other.holder(lock, expected=100) == 100
    assert same.holder(tmp_path / "gone", expected=100) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists its locks")
def test_the_system_names_the_process_that_holds_a_run(tmp_path: Path, holding: Holding) -> None:
    process = holding(tmp_path)
    locks = read_locks()
    assert locks is not None and locks.holder(tmp_path / LOCK, expected=None) == process.pid


def test_ids_are_found_whatever_their_case_and_groups_stand_for_what_is_there(tmp_path: Path) -> None:
    for experiment in ("GPT-01", "GPT-02", "SST-2-01"):
        record(tmp_path, "done", experiment=experiment)
    assert choose(tmp_path, ["gpt-02"]) == ["GPT-02"]
    assert choose(tmp_path, ["GPT", "GPT-01"], groups={"gpt": ["GPT-01", "GPT-02", "GPT-03"]}) == ["GPT-01", "GPT-02"]


@pytest.mark.parametrize("name", ["GPT-2", "..", "", "GPT-02/smoke", "/etc", "bert"])
def test_an_id_without_runs_is_refused_with_what_there_is(tmp_path: Path, name: str) -> None:
    record(tmp_path, "done")
    with pytest.raises(ConfigError, match="GPT-02"):
        choose(tmp_path, [name], groups={"bert": ["SST-2-01"]})


def test_the_monitor_loads_no_torch() -> None:
    code = "import sys, oelm.runs.manage, oelm.cli.status, oelm.cli.watch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_is_recorded_here_is_what_runs_record() -> None:
    assert set(status_of("done").model_dump()) == set(Status.model_fields)
