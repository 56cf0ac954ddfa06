"""A queue inside torchrun: all processes work on one run, then on the next."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from filelock import FileLock

from oelm.errors import STOPPED, OelmError, RankLostError
from oelm.experiments.launch import enqueue, is_busy, launch_lock, taken
from oelm.experiments.plan import PlannedRun
from oelm.experiments.runner import Job, RunnerWatch, State, is_done
from oelm.runs.status import read_status
from oelm.train.dist import World, agreed
from oelm.train.run import Options, Result, train
from oelm.train.stop import StopFlag
from oelm.train.watch import Watch

_GO, _SKIP = 1, 0


class Together:
    """Runs the planned runs one after the other, each on all processes of a world; the writer decides which.

    A run that fails ends the queue, because the processes may be at different places; a restart continues after it.
    """

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        root: Path,
        world: World,
        *,
        stop: StopFlag,
        watch: RunnerWatch,
        run_watch: Watch,
        retry: bool,
        options: Options,
        unready: Mapping[Path, str],
    ) -> None:
        self.jobs = [Job(run) for run in runs]
        self._root, self._world, self._stop = root, world, stop
        self._watch, self._run_watch, self._retry = watch, run_watch, retry
        self._options, self._unready = options, unready

    def run(self) -> list[Job]:
        """Return the jobs once each has ended, or after the first that failed or was stopped."""
        stop = agreed(self._stop, self._world)
        for job in self.jobs:
            if self._world.agree(stop):
                job.state, job.message = "stopped", "not begun"
            elif not self._bring_to_end(job):
                break
        return self.jobs

    def _bring_to_end(self, job: Job) -> bool:
        """Run one job; return whether the next may follow."""
        lock: FileLock | None = None
        with self._world.writer_first():
            if self._world.is_writer:
                lock = self._claim(job)
        try:
            if self._world.tell(_GO if lock is not None else _SKIP) == _SKIP:
                return True
            return self._train(job)
        finally:
            if lock is not None:
                lock.release()

    def _claim(self, job: Job) -> FileLock | None:
        """Return the launch lock of a run that may be started; else None, with the job's state set."""
        lock = launch_lock(job.run, self._root)
        job.state, job.message = self._reason_not_to(job, lock)
        if job.state == "running":
            job.started = time.monotonic()
            self._watch.on_start(job)
            return lock
        lock.release()
        self._watch.on_end(job)
        return None

    def _reason_not_to(self, job: Job, lock: FileLock) -> tuple[State, str]:
        """Return why a run cannot be started, or 'running' with its launch lock taken."""
        if is_done(job.run):
            return "found done", ""
        if (problem := self._unready.get(job.run.path)) is not None:
            return "failed", problem
        enqueue(job.run, self._root, retry=self._retry)
        status = read_status(job.run.path)
        if status is not None and status.status == "failed":
            return "failed", status.message
        return ("running", "") if taken(lock) and not is_busy(job.run.path) else ("left", "")

    def _train(self, job: Job) -> bool:
        try:
            result = train(
                job.run.config,
                job.run.path,
                stop=self._stop,
                watch=self._run_watch,
                options=self._options,
                world=self._world,
            )
        except RankLostError:
            raise
        except OelmError as problem:
            job.state, job.message = "stopped" if problem.exit_code == STOPPED else "failed", str(problem)
            self._watch.on_end(job)
            return False
        self._note(job, result)
        return result.status != "stopped"

    def _note(self, job: Job, result: Result) -> None:
        job.state, job.seconds = result.status, time.monotonic() - job.started
        self._watch.on_end(job)
