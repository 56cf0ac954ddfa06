"""One run as one process: who may start it, how it is started, and how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from oelm.errors import DONE, STOPPED
from oelm.experiments.plan import PlannedRun
from oelm.files import dump_json, room_checked, write_json
from oelm.train.status import STATUS, Progress, now_text, read_status, status_now

CONSOLE = "console.log"
_LOCKS = ".launch"
_SIGNAL_HINTS = {
    signal.SIGKILL: "by hand, or by the system when memory ran out",
    signal.SIGBUS: "a data file shrank while it was read; `oelm data verify` finds it",
}


@dataclass(frozen=True)
class Ending:
    """How a run's process ended: 'done', 'stopped' (repeat to go on), 'killed' (likewise), 'failed', or 'busy' elsewhere."""

    state: str
    message: str = ""


def launch_lock(run: PlannedRun, root: Path) -> FileLock:
    """Return the lock that a launcher holds while it starts a run and waits for it: two never start the same one."""
    parts = run.path.relative_to(root).parts
    folder = root / _LOCKS
    with room_checked(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{'--'.join(parts)}.lock")


def taken(lock: FileLock) -> bool:
    """Take a lock if nobody has it; whether we have it now."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def is_busy(run: Path) -> bool:
    """Whether some process holds the run right now. Only a launcher that holds the launch lock may ask: it takes the lock."""
    if not run.is_dir():
        return False
    lock = FileLock(run / ".lock")
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
        if not (run.path / "config.json").is_file():
            write_json(run.path / "config.json", run.config.as_dict())
        progress = Progress(step=0, steps=run.config.steps)
        if status is not None:
            progress = Progress.model_validate(status.model_dump(include=set(Progress.model_fields)))
        write_json(run.path / STATUS, status_now("queued", progress, started=now_text()).model_dump(mode="json"))
    finally:
        lock.release()


def start(run: PlannedRun, environment: dict[str, str], *, options: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a run's process: the config by standard input, what it prints into console.log, deaf to our terminal."""
    with room_checked(run.path / CONSOLE):
        run.path.mkdir(parents=True, exist_ok=True)
        with (run.path / CONSOLE).open("ab") as console:
            process = subprocess.Popen(
                [sys.executable, "-m", "oelm", "work", str(run.path), *options],
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=console,
                env={**os.environ, **environment},
                start_new_session=True,
            )
    assert process.stdin is not None
    # A child that ended at once is told of by its exit code.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(dump_json(run.config.as_dict()).encode())
        process.stdin.close()
    return process


def ending(run: PlannedRun, exit_code: int) -> Ending:
    """Tell how a run's process ended from its exit code and what it left behind."""
    status = read_status(run.path)
    message = status.message if status is not None else ""
    if exit_code == DONE and status is not None and status.status == "done":
        return Ending("done")
    if exit_code < 0:
        number = signal.Signals(-exit_code)
        hint = _SIGNAL_HINTS.get(number, "")
        return Ending("killed", f"killed by {number.name}" + (f" ({hint})" if hint else ""))
    if exit_code == STOPPED:
        return Ending("stopped", message or _last_words(run.path))
    if is_busy(run.path):
        return Ending("busy")
    failed_itself = status is not None and status.status == "failed"
    return Ending("failed", (message if failed_itself else "") or _last_words(run.path) or f"exit code {exit_code}")


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
