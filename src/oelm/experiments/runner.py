"""A queue of runs, each a process in a free slot; finished ones are skipped."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from filelock import FileLock

from oelm.errors import DiskFullError
from oelm.experiments.launch import ending, enqueue, is_busy, launch_lock, send_stop, start, taken
from oelm.experiments.plan import PlannedRun
from oelm.runs.status import read_status
from oelm.train.stop import StopFlag

State = Literal["waiting", "running", "elsewhere", "done", "found done", "failed", "killed", "stopped", "left"]
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
    state: State = "waiting"
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

    def _end(self, job: Job, state: State, message: str = "") -> None:
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
