"""Disks without flock, where the lock is a file that names its process: held, seen from outside, stopped, let go by a kill."""

from __future__ import annotations

import datetime
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oelm.data.prepare import held_alone
from oelm.errors import OelmError, RunDirError
from oelm.experiments.monitor import LOCK, look_at
from oelm.experiments.upkeep import ask_to_stop
from oelm.locks import is_marker
from oelm.report.verdict import Looks
from oelm.train.rundir import RunDir
from oelm.train.status import HOLDER, Progress
from tests.conftest import tiny_config

fcntl = pytest.importorskip("fcntl")
pytestmark = pytest.mark.filterwarnings("ignore:flock not supported")
# Holds a run as a training process does, until it is told to stop or killed.
HOLDS = """
import errno, fcntl, signal, sys, warnings
from pathlib import Path
def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")
if sys.argv[2] == "without":
    warnings.simplefilter("ignore")
    fcntl.flock = flock
from oelm.train.rundir import RunDir
from oelm.train.status import Progress
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
with RunDir(Path(sys.argv[1])) as run:
    run.set_status("running", Progress(step=1, steps=9))
    print("held", flush=True)
    signal.pause()
"""
Held = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def held() -> Iterator[Held]:
    started: list[subprocess.Popen[str]] = []

    def start(run: Path, flock: str = "without") -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLDS, str(run), flock], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def without(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every flock of this process fail with an error."""

    def missing(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", missing)


@pytest.fixture
def run(tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder on such a disk, for this process as well."""
    without(errno.ENOSYS, monkeypatch)
    with RunDir(tmp_path / "e" / "smoke" / "default" / "seed-0") as folder:
        folder.claim(tiny_config(text_file))
    return folder.path


def test_the_holder_is_named_beside_the_lock_and_a_second_is_refused(run: Path, held: Held) -> None:
    process = held(run)
    assert is_marker(run / LOCK) and (run / LOCK).read_text().startswith(f"{process.pid}\n")
    with pytest.raises(RunDirError, match=rf"in use by process {process.pid} on "), RunDir(run):
        pass


def test_a_run_whose_process_was_killed_is_free_again(run: Path, held: Held) -> None:
    process = held(run)
    process.kill()
    process.wait()
    assert (run / HOLDER).is_file() and (run / LOCK).is_file()
    with RunDir(run) as folder:
        folder.set_status("running", Progress(step=2, steps=9))
    assert not (run / HOLDER).exists()


def test_the_run_is_seen_to_live_while_it_does(run: Path, held: Held) -> None:
    process = held(run)
    assert look_at(run).state == "running"
    process.kill()
    process.wait()
    assert look_at(run).state == "dead"


def test_the_run_is_asked_to_stop(run: Path, held: Held) -> None:
    process = held(run)
    asked = ask_to_stop([look_at(run)])
    assert [view.path for view in asked.signalled] == [run]
    assert process.wait(timeout=60) == 75


@pytest.mark.parametrize("content", ["", '{"pid": 1, "host": "h", "started": "s"}'], ids=["empty", "of an earlier version"])
def test_a_lock_of_the_kernel_is_no_marker_whatever_is_in_its_file(content: str, tmp_path: Path, held: Held) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK).write_text(content)
    (run / "config.json").write_text("{}")
    process = held(run, "with")
    assert not is_marker(run / LOCK) and (run / LOCK).read_text() == content
    assert look_at(run).state == "running"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert look_at(run).state == "dead" and not is_marker(tmp_path / "nowhere")


def hold_run(folder: Path) -> None:
    with RunDir(folder):
        pass


def hold_data(folder: Path) -> None:
    def waiting(what: str, done: int, total: int, tokens: int) -> None:
        pytest.fail(what)

    with held_alone(folder / "set", waiting):
        pass


def record_a_look(folder: Path) -> None:
    Looks(folder, {}).record({"a": [0, 1]}, date=datetime.date(2026, 1, 1))


HOLDERS = {".lock": hold_run, ".set.lock": hold_data, ".looks.lock": record_a_look}


@pytest.mark.parametrize("name", HOLDERS)
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_disk_that_gives_no_locks_is_refused_at_once(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(number, monkeypatch)
    with pytest.raises(OelmError, match=rf"{name}: cannot be locked .*{os.strerror(number)}.* Work on a local disk"):
        HOLDERS[name](tmp_path)


@pytest.mark.parametrize("name", HOLDERS)
def test_a_lock_left_from_where_there_was_flock_is_refused_and_not_waited_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(errno.ENOSYS, monkeypatch)
    (tmp_path / name).touch()
    with pytest.raises(OelmError, match=rf"{name}: this file system has no locks .* delete that file and repeat the command"):
        HOLDERS[name](tmp_path)
    (tmp_path / name).unlink()
    HOLDERS[name](tmp_path)
