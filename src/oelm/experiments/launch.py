"""One run as one process: its launch lock, its start, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock

from oelm.errors import STOPPED, OelmError
from oelm.experiments.plan import PlannedRun
from oelm.files import room_checked, write_text
from oelm.locks import lock_at, take
from oelm.runs.layout import CONSOLE, LOCK, launch_lock_path
from oelm.runs.status import Progress, StatusName, now_text, read_status, status_now, write_status

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "by hand, or by the system when memory ran out",
    signal.SIGBUS: "a data file shrank while it was read; `oelm data verify` finds it",
}


@dataclass(frozen=True)
class Ending:
    """How a run's process ended; 'stopped' and 'killed' runs can be resumed, a 'busy' one is held by another process."""

    state: Literal["done", "stopped", "killed", "failed", "busy"]
    message: str = ""


def launch_lock(run: PlannedRun, root: Path) -> FileLock:
    """Return the lock that a launcher holds while its run runs, so that no run is started twice."""
    path = launch_lock_path(root, run.path)
    with room_checked(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return lock_at(path)


def taken(lock: FileLock) -> bool:
    """Take a lock if it is free; return whether we have it."""
    with room_checked(Path(lock.lock_file)):
        return take(lock)


def is_busy(run: Path) -> bool:
    """Whether a process holds the run. Call it only with the launch lock: it briefly takes the run's lock."""
    if not run.is_dir():
        return False
    lock = lock_at(run / LOCK)
    if not taken(lock):
        return True
    lock.release()
    return False


def enqueue(run: PlannedRun, root: Path, *, retry: bool) -> None:
    """Record that a run is queued, unless it is done, failed (without `retry`) or running."""
    lock = launch_lock(run, root)
    if not taken(lock):
        return
    try:
        status = read_status(run.path)
        kept = ("done",) if retry else ("done", "failed")
        if (status is not None and status.status in kept) or is_busy(run.path):
            return
        if not (run.path / "config.json").is_file():
            write_text(run.path / "config.json", run.config_text)
        _write_status(run, "queued")
    finally:
        lock.release()


def _write_status(run: PlannedRun, name: StatusName, message: str = "") -> None:
    """Write the status of a run that no process holds, keeping its progress."""
    progress = Progress(step=0, steps=run.config.steps)
    if (status := read_status(run.path)) is not None:
        progress = Progress.model_validate(status.model_dump(include=set(Progress.model_fields)))
    write_status(run.path, status_now(name, progress, started=now_text(), message=message))


def start(run: PlannedRun, environment: dict[str, str], *, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a run's process in a new session: config on standard input, output to console.log."""
    # -P: do not import from the working folder, which may have a random.py. --: a path may begin with a dash.
    command = [sys.executable, "-P", "-m", "oelm", "work", *options, "--", str(run.path)]
    with room_checked(run.path / CONSOLE):
        run.path.mkdir(parents=True, exist_ok=True)
        console = (run.path / CONSOLE).open("ab")
    with console:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=console,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as problem:
            raise OelmError(f"no process can be started ({problem}); end other processes and repeat the command") from problem
    assert process.stdin is not None
    # If the child has ended already, its exit code says why.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(run.config_text.encode())
        process.stdin.close()
    return process


def ending(run: PlannedRun, exit_code: int, *, asked: bool = False) -> Ending:
    """Return how a run's process ended, by its exit code and its status; `asked` is whether it was asked to stop.

    Call it with the launch lock: a failure that the run could not record itself is recorded here.
    """
    status = read_status(run.path)
    state = status.status if status is not None else "queued"
    message = status.message if status is not None and state != "running" else ""
    # Done counts, even if a signal came at the very end or another process finished it.
    if status is not None and state == "done" and status.step >= run.config.steps:
        return Ending("done")
    # While the interpreter starts and ends, SIGTERM kills it.
    if exit_code == STOPPED or (asked and exit_code == -signal.SIGTERM and state != "failed"):
        return Ending("stopped", message or (_last_words(run.path) if exit_code == STOPPED else "before it began"))
    if exit_code < 0:
        return Ending("killed", _killed_by(-exit_code))
    if is_busy(run.path):
        return Ending("busy")
    if state == "failed":
        return Ending("failed", message or f"exit code {exit_code}")
    message = _last_words(run.path) or f"exit code {exit_code}"
    # A full disk must not hide how the run ended.
    with contextlib.suppress(OelmError):
        _write_status(run, "failed", message)
    return Ending("failed", message)


def _killed_by(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        # Most real-time signals have no name.
        name = f"signal {number}"
    hint = _SIGNAL_HINTS.get(number, "")
    return f"killed by {name}" + (f" ({hint})" if hint else "")


def _last_words(run: Path) -> str:
    """Return the last line of a run's console.log."""
    with contextlib.suppress(OSError):
        lines = (run / CONSOLE).read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def send_stop(process: subprocess.Popen[bytes]) -> None:
    """Send a run's process SIGTERM: it saves and ends."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
