"""One run as one process: who may start it, how it is started, and how it ended."""

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
from oelm.files import dump_json, room_checked, write_json
from oelm.locks import lock_at, take
from oelm.runs.layout import CONFIG, CONSOLE, LOCK, launch_lock_path
from oelm.runs.status import Progress, StatusName, now_text, read_status, status_now, write_status

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "by hand, or by the system when memory ran out",
    signal.SIGBUS: "a data file shrank while it was read; `oelm data verify` finds it",
}


@dataclass(frozen=True)
class Ending:
    """How a run's process ended: 'done', 'stopped' (repeat to go on), 'killed' (likewise), 'failed', or 'busy' elsewhere."""

    state: Literal["done", "stopped", "killed", "failed", "busy"]
    message: str = ""


def launch_lock(run: PlannedRun, root: Path) -> FileLock:
    """Return the lock that a launcher holds while it starts a run and waits for it: two never start the same one."""
    path = launch_lock_path(root, run.path)
    with room_checked(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    return lock_at(path)


def taken(lock: FileLock) -> bool:
    """Take a lock if nobody has it; whether we have it now."""
    with room_checked(Path(lock.lock_file)):
        return take(lock)


def is_busy(run: Path) -> bool:
    """Whether some process holds the run right now. Only a launcher that holds the launch lock may ask: it takes the lock."""
    if not run.is_dir():
        return False
    lock = lock_at(run / LOCK)
    if not taken(lock):
        return True
    lock.release()
    return False


def enqueue(run: PlannedRun, root: Path, *, retry: bool) -> None:
    """Write down that a run is planned, unless it is done, failed (without `retry`), or somebody is at it."""
    lock = launch_lock(run, root)
    if not taken(lock):
        return
    try:
        status = read_status(run.path)
        kept = ("done",) if retry else ("done", "failed")
        if (status is not None and status.status in kept) or is_busy(run.path):
            return
        if not (run.path / CONFIG).is_file():
            write_json(run.path / CONFIG, run.config.as_dict())
        _write_status(run, "queued")
    finally:
        lock.release()


def _write_status(run: PlannedRun, name: StatusName, message: str = "") -> None:
    """Write a status from outside, at the step where the run left off. Only while nobody holds the run."""
    progress = Progress(step=0, steps=run.config.steps)
    if (status := read_status(run.path)) is not None:
        progress = Progress.model_validate(status.model_dump(include=set(Progress.model_fields)))
    write_status(run.path, status_now(name, progress, started=now_text(), message=message))


def start(run: PlannedRun, environment: dict[str, str], *, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a run's process: the config by standard input, what it prints into console.log, deaf to our terminal."""
    # -P: a file called random.py in the working folder is not Python's. --: a folder's name may begin with a dash.
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
            raise OelmError(f"no process can be started ({problem}); end others of yours and repeat the command") from problem
    assert process.stdin is not None
    # A child that ended at once is told of by its exit code.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(dump_json(run.config.as_dict()).encode())
        process.stdin.close()
    return process


def ending(run: PlannedRun, exit_code: int, *, asked: bool = False) -> Ending:
    """Tell how a run's process ended from its exit code and what it left behind; `asked` is whether it was to stop.

    Call it while holding the launch lock: a failure that the run could not note itself is noted here.
    """
    status = read_status(run.path)
    said = status.status if status is not None else "queued"
    message = status.message if status is not None and said != "running" else ""
    # Whatever came after that, a signal at its very end or another process that had finished it, it is done.
    if status is not None and said == "done" and status.step >= run.config.steps:
        return Ending("done")
    # Python has its own answer to a signal only between its start and its end.
    if exit_code == STOPPED or (asked and exit_code == -signal.SIGTERM and said != "failed"):
        return Ending("stopped", message or (_last_words(run.path) if exit_code == STOPPED else "before it began"))
    if exit_code < 0:
        return Ending("killed", _killed_by(-exit_code))
    if is_busy(run.path):
        return Ending("busy")
    if said == "failed":
        return Ending("failed", message or f"exit code {exit_code}")
    message = _last_words(run.path) or f"exit code {exit_code}"
    # How it ended counts, not that there is no room to write it down.
    with contextlib.suppress(OelmError):
        _write_status(run, "failed", message)
    return Ending("failed", message)


def _killed_by(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        # Of the real-time signals only the first and the last have names.
        name = f"signal {number}"
    hint = _SIGNAL_HINTS.get(number, "")
    return f"killed by {name}" + (f" ({hint})" if hint else "")


def _last_words(run: Path) -> str:
    """Return the last line that a run's process printed."""
    with contextlib.suppress(OSError):
        lines = (run / CONSOLE).read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""


def ask_to_stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a run to save and end."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
