"""A queue of runs as separate processes: finished ones skipped, the rest brought to their end, one per free slot."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from filelock import FileLock

from oelm.experiments.launch import Ending, ask_to_stop, ending, enqueue, is_busy, launch_lock, start, taken
from oelm.experiments.plan import PlannedRun
from oelm.train.status import read_status
from oelm.train.stop import StopFlag

State = Literal["waiting", "running", "elsewhere", "done", "found done", "failed", "killed", "stopped"]
ENDED = ("done", "found done", "failed", "killed", "stopped")
_POLL_S = 0.05
_LOOK_S = 1.0


class Slot(Protocol):
    """A place to run: some threads of the CPU, or a GPU."""

    @property
    def name(self) -> str: ...

    def environment(self) -> dict[str, str]: ...

    def release(self) -> None: ...


class Slots(Protocol):
    """Where slots come from; None while there is none to be had."""

    def take(self) -> Slot | None: ...


@dataclass
class Job:
    """A planned run and what became of it in this sitting."""

    run: PlannedRun
    state: State = "waiting"
    message: str = ""
    process: subprocess.Popen[bytes] | None = None
    lock: FileLock | None = None
    slot: Slot | None = None
    started: float = 0.0
    seconds: float = 0.0
    looked: float = field(default=-_LOOK_S)

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


class RunnerWatch(Protocol):
    """Hears of jobs as they start and end, and of the whole queue now and then."""

    def on_start(self, job: Job) -> None: ...

    def on_end(self, job: Job) -> None: ...

    def on_tick(self, jobs: Sequence[Job]) -> None: ...


class Runner:
    """Brings planned runs to their end. Kill it at any time: repeating it finishes what is left, and nothing twice."""

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
    ) -> None:
        self.jobs = [Job(run) for run in runs]
        self._root, self._slots, self._stop, self._watch = root, slots, stop, watch
        self._retry, self._options = retry, options

    def run(self) -> list[Job]:
        """Return the jobs once each has ended, or, after a stop, once the running ones have saved and left."""
        for job in self.jobs:
            enqueue(job.run, self._root, retry=self._retry)
        asked = False
        try:
            while not all(job.has_ended for job in self.jobs):
                if self._stop.requested() and not asked:
                    asked = True
                    self._ask_all_to_stop()
                self._reap()
                if not asked:
                    self._fill()
                self._watch.on_tick(self.jobs)
                time.sleep(_POLL_S)
        finally:
            # Only an interrupt at once leaves any: they go on by themselves, and the same command finds them.
            for job in self.jobs:
                self._let_go(job)
        return self.jobs

    def _ask_all_to_stop(self) -> None:
        for job in self.jobs:
            if job.process is not None:
                ask_to_stop(job.process)
            elif not job.has_ended:
                job.message = "not begun" if job.state == "waiting" else "in the hands of another process"
                job.state = "stopped"

    def _reap(self) -> None:
        for job in self.jobs:
            if job.process is None or (code := job.process.poll()) is None:
                continue
            job.seconds = time.monotonic() - job.started
            self._let_go(job)
            self._conclude(job, ending(job.run, code))

    def _conclude(self, job: Job, end: Ending) -> None:
        if end.state == "busy":
            job.state = "elsewhere"
            return
        job.state, job.message = end.state, end.message  # type: ignore[assignment]
        self._watch.on_end(job)

    def _fill(self) -> None:
        slot: Slot | None = None
        for job in self.jobs:
            if job.state not in ("waiting", "elsewhere") or (job.state == "elsewhere" and not self._is_time(job)):
                continue
            slot = slot or self._slots.take()
            if slot is None:
                return
            if self._begin(job, slot):
                slot = None
        if slot is not None:
            slot.release()

    def _is_time(self, job: Job) -> bool:
        if time.monotonic() - job.looked < _LOOK_S:
            return False
        job.looked = time.monotonic()
        return True

    def _begin(self, job: Job, slot: Slot) -> bool:
        """Start a job in a slot unless it is done, given up or in other hands; whether the slot is used."""
        lock = launch_lock(job.run, self._root)
        if not taken(lock):
            job.state = "elsewhere"
            return False
        if self._needs_nothing(job) or self._is_elsewhere(job):
            lock.release()
            return False
        job.lock, job.slot, job.started, job.state = lock, slot, time.monotonic(), "running"
        job.process = start(job.run, slot.environment(), options=self._options)
        self._watch.on_start(job)
        return True

    def _needs_nothing(self, job: Job) -> bool:
        status = read_status(job.run.path)
        if status is None:
            return False
        was_elsewhere = job.state == "elsewhere"
        if status.status == "done" and status.step >= job.run.config.steps:
            job.state = "found done"
        elif status.status == "failed" and (not self._retry or was_elsewhere):
            job.state, job.message = "failed", status.message
        # Queued by us a moment ago; anything else is somebody's wish since then.
        elif status.status == "stopped":
            job.state, job.message = "stopped", status.message or "asked to stop"
        else:
            return False
        self._watch.on_end(job)
        return True

    def _is_elsewhere(self, job: Job) -> bool:
        if not is_busy(job.run.path):
            return False
        job.state = "elsewhere"
        return True

    def _let_go(self, job: Job) -> None:
        if job.slot is not None:
            job.slot.release()
        if job.lock is not None:
            job.lock.release()
        job.process, job.slot, job.lock = None, None, None
