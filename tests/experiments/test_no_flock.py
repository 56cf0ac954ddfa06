"""File systems without flock: refused at once wherever a lock is taken, and never replaced by files that act as locks."""

from __future__ import annotations

import datetime
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import oelm
from oelm.cli.app import app
from oelm.data.tokens import held_alone
from oelm.errors import OelmError
from oelm.experiments.portable import archive_runs
from oelm.experiments.queue import is_busy
from oelm.experiments.slots import GpuPool
from oelm.report.judge import Looks
from oelm.runs.find import look_at, scan
from oelm.runs.layout import LOCK
from oelm.runs.manage import remove
from oelm.runs.rundir import RunDir
from tests.cases import case
from tests.experiments.recorded import record
from tests.experiments.test_gpus import card

fcntl = pytest.importorskip("fcntl")
# Holds a run as a training process does, until it is killed.
HOLDS = """
import signal, sys
from pathlib import Path
from oelm.runs.rundir import RunDir
from oelm.runs.status import Progress
with RunDir(Path(sys.argv[1])) as run:
    run.set_status("running", Progress(step=1, steps=9))
    print("held", flush=True)
    signal.pause()
"""


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def reason(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let every flock of this process fail with an error; return its text."""

    def missing(*_: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", missing)
    return os.strerror(request.param)


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


def archive_a_run(folder: Path) -> None:
    record(folder / "outputs", "done")
    archive_runs(folder, scan(folder / "outputs"), weights=False)


def reserve_a_gpu(folder: Path) -> None:
    with GpuPool((0,), read=lambda: [card(0, uuid="GPU-0")], folder=folder) as pool:
        pool.take()


HOLDERS = {
    ".lock": hold_run,
    ".set.lock": hold_data,
    ".looks.lock": record_a_look,
    ".archive.lock": archive_a_run,
    "GPU-0.lock": reserve_a_gpu,
    "/.lock": is_busy,
}


@pytest.mark.parametrize("is_left", [False, True], ids=["clean", "a lock file was left"])
def test_a_disk_without_locks_is_refused_at_once(is_left: bool, tmp_path: Path, reason: str) -> None:
    for number, (name, hold) in enumerate(HOLDERS.items()):
        with case(name):
            folder = tmp_path / str(number)
            folder.mkdir()
            if is_left:
                (folder / name.strip("/")).touch()
            with pytest.raises(
                OelmError, match=rf"{name}: cannot be locked .*{reason}.* Put the folder on a local disk \(--out"
            ):
                hold(folder)
            # Nothing acts as a lock instead: filelock's own files name their process.
            assert all(path.read_bytes() == b"" for path in folder.rglob("*lock"))


def test_a_run_that_cannot_be_locked_is_not_deleted(tmp_path: Path, reason: str) -> None:
    run = record(tmp_path, "done")
    (view,) = scan(tmp_path)
    with pytest.raises(OelmError, match=reason):
        remove(tmp_path, view, weights=False)
    assert (run / "config.json").is_file()


def test_training_leaves_with_the_code_of_a_refusal(tmp_path: Path, text_file: Path, reason: str) -> None:
    words = ["train", "--budget", "smoke", "--text", str(text_file), "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 3 and reason in result.output
    assert not (tmp_path / "run" / "config.json").exists()


def test_every_lock_is_made_where_the_fallback_is_off() -> None:
    source = Path(oelm.__file__).parent
    makers = [path.name for path in source.rglob("*.py") if re.search(r"\w*FileLock\(", path.read_text(encoding="utf-8"))]
    assert makers == ["files.py"]


@pytest.mark.parametrize("content", ["", "4711\n", '{"pid": 1, "host": "h", "started": "s"}'])
def test_a_lock_is_the_kernels_whatever_is_in_its_file(content: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK).write_text(content)
    (run / "config.json").write_text("{}")
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(run)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert (run / LOCK).read_text() == content and look_at(run).state == "running"
        process.send_signal(signal.SIGKILL)
    assert look_at(run).state == "dead"
