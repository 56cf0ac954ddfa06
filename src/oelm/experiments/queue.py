"""A queue of runs, each its own process: finished ones are skipped, the others start as slots become free."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from filelock import FileLock

from oelm.errors import STOPPED, DiskFullError, OelmError
from oelm.experiments.plan import PlannedRun
from oelm.files import lock_at, room_checked, take, write_text
from oelm.process import StopFlag
from oelm.runs.layout import CONFIG, CONSOLE, LOCK, launch_lock_path
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
        if not (run.path / CONFIG).is_file():
            write_text(run.path / CONFIG, run.config_text)
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
        # Who prints it says already how the run ended.
        return next((line.strip() for line in reversed(lines) if line.strip()), "").removeprefix("stopped: ")
    return ""


def send_stop(process: subprocess.Popen[bytes]) -> None:
    """Send a run's process SIGTERM: it saves and ends."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


JobState = Literal["waiting", "running", "elsewhere", "done", "found done", "failed", "killed", "stopped", "left"]
# 'left': we stop, and another process continues the run.
ENDED = ("done", "found done", "failed", "killed", "stopped", "left")
_POLL_S = 0.05
_LOOK_S = 1.0


class RunSlot(Protocol):
    """A place to run: a share of the CPU's threads, or a GPU."""

    @property
    def name(self) -> str: ...

    def environment(self) -> dict[str, str]: ...

    def release(self) -> None: ...


class Slots(Protocol):
    """Hands out up to `count` slots; None while none is free. `adopted` runs of dead launchers occupy slots too."""

    @property
    def count(self) -> int: ...

    def take(self, *, adopted: int) -> RunSlot | None: ...


@dataclass
class Job:
    """A planned run and its state in this queue."""

    run: PlannedRun
    state: JobState = "waiting"
    message: str = ""
    process: subprocess.Popen[bytes] | None = None
    lock: FileLock | None = None
    slot: RunSlot | None = None
    started: float = 0.0
    seconds: float = 0.0
    looked: float = field(default=-_LOOK_S)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_adopted(self) -> bool:
        """Whether the run's launcher died and this queue watches it now."""
        return self.state == "elsewhere" and self.lock is not None


class RunnerWatch(Protocol):
    """Is notified when jobs start and end, and of the whole queue at intervals."""

    def on_start(self, job: Job) -> None: ...

    def on_end(self, job: Job) -> None: ...

    def on_tick(self, jobs: Sequence[Job]) -> None: ...


class Runner:
    """Runs the planned runs to completion. It may be killed at any time: repeating it runs what is left, nothing twice.

    `unready` holds why some runs cannot be started; the others are run.
    """

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        root: Path,
        slots: Slots,
        *,
        stop: StopFlag,
        watch: RunnerWatch,
        retry: bool = False,
        options: tuple[str, ...] = (),
        unready: Mapping[Path, str] | None = None,
    ) -> None:
        self.jobs = [Job(run) for run in runs]
        self._root, self._slots, self._stop, self._watch = root, slots, stop, watch
        self._retry, self._options, self._unready = retry, options, unready or {}
        self._asked = False

    def run(self) -> list[Job]:
        """Return the jobs once each has ended, or, after a stop, once the running ones have saved and left."""
        try:
            self._settle()
            while not all(job.has_ended for job in self.jobs):
                if self._stop.requested() and not self._asked:
                    self._asked = True
                    self._ask_all_to_stop()
                self._reap()
                if not self._asked:
                    self._look_again()
                    self._fill()
                self._watch.on_tick(self.jobs)
                time.sleep(_POLL_S)
        finally:
            # After an immediate interrupt, running processes continue, and the same command finds them.
            for job in self.jobs:
                self._let_go(job)
        return self.jobs

    def _settle(self) -> None:
        """Set the state of jobs that need no slot: finished ones, and those that a killed launcher left running."""
        for job in self.jobs:
            if is_done(job.run):
                self._end(job, "found done")
            elif (problem := self._unready.get(job.run.path)) is not None:
                self._end(job, "failed", problem)
            else:
                enqueue(job.run, self._root, retry=self._retry)
                self._look(job)

    def _ask_all_to_stop(self) -> None:
        for job in self.jobs:
            if job.process is not None:
                send_stop(job.process)
            elif job.state == "elsewhere":
                self._end(job, "left")
            elif not job.has_ended:
                job.state, job.message = "stopped", "not begun"

    def _reap(self) -> None:
        for job in self.jobs:
            if job.process is None or (code := job.process.poll()) is None:
                continue
            job.seconds = time.monotonic() - job.started
            # Before the lock is released: the next launcher must find a failure recorded.
            end = ending(job.run, code, asked=self._asked)
            self._let_go(job)
            if end.state != "busy":
                self._end(job, end.state, end.message)
            elif self._asked:
                self._end(job, "left")
            else:
                job.state = "elsewhere"

    def _end(self, job: Job, state: JobState, message: str = "") -> None:
        job.state, job.message = state, message
        self._watch.on_end(job)

    def _look_again(self) -> None:
        """Check once a second whether runs of other processes have ended; a killed one then waits for a slot here."""
        for job in self.jobs:
            if job.state == "elsewhere" and time.monotonic() - job.looked >= _LOOK_S:
                job.looked = time.monotonic()
                self._look(job)

    def _look(self, job: Job) -> None:
        if (lock := self._claim(job)) is not None:
            lock.release()

    def _fill(self) -> None:
        for job in self.jobs:
            if job.state != "waiting":
                continue
            slot = self._slots.take(adopted=sum(other.is_adopted for other in self.jobs))
            if slot is None:
                return
            if (lock := self._claim(job)) is not None:
                self._begin(job, lock, slot)
            else:
                slot.release()

    def _begin(self, job: Job, lock: FileLock, slot: RunSlot) -> None:
        job.lock, job.slot, job.started, job.state = lock, slot, time.monotonic(), "running"
        try:
            job.process = start(job.run, slot.environment(), options=self._options)
        except DiskFullError as problem:
            # The others continue while they have room.
            self._let_go(job)
            self._end(job, "stopped", str(problem))
            return
        self._watch.on_start(job)

    def _claim(self, job: Job) -> FileLock | None:
        """Return the launch lock of a job that may be started; else None, with the job's state set."""
        lock = job.lock or launch_lock(job.run, self._root)
        if job.lock is None and not taken(lock):
            job.state = "elsewhere"
            return None
        # A run that we watch occupies its slot until its process releases the lock, even after its status is final.
        if not (job.is_adopted and is_busy(job.run.path)) and self._needs_nothing(job):
            job.lock = None
            lock.release()
            return None
        if is_busy(job.run.path):
            # Its launcher is gone: watch it, and keep the lock.
            job.state, job.lock = "elsewhere", lock
            return None
        job.state, job.lock = "waiting", None
        return lock

    def _needs_nothing(self, job: Job) -> bool:
        was_elsewhere = job.state == "elsewhere"
        status = read_status(job.run.path)
        if status is None:
            return False
        if is_done(job.run):
            self._end(job, "found done", "in another process")
        elif status.status == "failed" and (not self._retry or was_elsewhere):
            self._end(job, "failed", status.message)
        # We queued it a moment ago, so somebody stopped it since.
        elif status.status == "stopped":
            self._end(job, "stopped", status.message or "asked to stop")
        else:
            return False
        return True

    def _let_go(self, job: Job) -> None:
        if job.slot is not None:
            job.slot.release()
        if job.lock is not None:
            job.lock.release()
        job.process, job.slot, job.lock = None, None, None


def is_done(run: PlannedRun) -> bool:
    """Whether a planned run is done, at its full length."""
    status = read_status(run.path)
    return status is not None and status.status == "done" and status.step >= run.config.steps
