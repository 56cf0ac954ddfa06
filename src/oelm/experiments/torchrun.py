"""One run on many processes: torchrun as a child, and a queue that its processes work through together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from oelm.data.tokenizer import num_cores
from oelm.errors import STOPPED, ConfigError, OelmError, RankLostError
from oelm.experiments.plan import PlannedRun
from oelm.experiments.queue import Job, JobState, RunnerWatch, enqueue, is_busy, is_done, launch_lock, send_stop, taken
from oelm.process import StopFlag
from oelm.runs.status import read_status
from oelm.train.dist import World, agreed
from oelm.train.run import Options, Result, train
from oelm.train.watch import Watch

_POLL_S = 0.05
# After a stop a run finishes a step and saves; torchrun's default of half a minute is too short for that.
_SHUTDOWN_S = 300
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Ranks:
    """How many processes work on one run, and where they meet: options of torchrun."""

    nproc: int
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    max_restarts: int = 3

    def __post_init__(self) -> None:
        if self.nproc < 1 or self.nnodes < 1 or self.max_restarts < 0:
            raise ConfigError("--nproc and --nnodes must be at least 1, and --max-restarts at least 0")
        if self.nnodes > 1 and not (self.rdzv_endpoint and self.rdzv_id):
            raise ConfigError(
                f"--nnodes {self.nnodes}: the hosts must find each other: give each the same --rdzv-endpoint HOST:PORT and "
                "--rdzv-id NAME"
            )
        if self.nnodes == 1 and (self.rdzv_endpoint or self.rdzv_id):
            raise ConfigError("--rdzv-endpoint and --rdzv-id are for several hosts; give --nnodes too")

    def check(self, runs: Sequence[PlannedRun]) -> None:
        """Raise ConfigError if a run's batch does not divide among the processes."""
        for run in runs:
            World(size=self.nproc * self.nnodes).micro_batch_size(run.config.batch_size, run.config.micro_batch_size)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs `oelm` with these arguments in every process."""
        meeting = ["--standalone"]
        if self.nnodes > 1:
            meeting = ["--nnodes", str(self.nnodes), "--rdzv-backend", "c10d"]
            meeting += ["--rdzv-endpoint", str(self.rdzv_endpoint), "--rdzv-id", str(self.rdzv_id)]
        options = ["--nproc-per-node", str(self.nproc), "--max-restarts", str(self.max_restarts)]
        shutdown = ["--shutdown-timeout", str(_SHUTDOWN_S)]
        return [sys.executable, "-P", "-m", "torch.distributed.run", *meeting, *options, *shutdown, "-m", "oelm", *arguments]

    def environment(self) -> dict[str, str]:
        """Return the environment of the processes: an equal share of the cores each, unless the user set one."""
        return {_THREADS: str(max(1, num_cores() // self.nproc)), **os.environ}


def run_by_torchrun(
    runs: Sequence[PlannedRun], root: Path, ranks: Ranks, arguments: Sequence[str], *, stop: StopFlag, retry: bool
) -> list[Job]:
    """Run the runs on the processes that torchrun starts; restart it after a run that failed, to run the rest.

    Outcomes are read from status.json, because torchrun's exit code does not distinguish them.
    """
    ranks.check(runs)
    for run in runs:
        enqueue(run, root, retry=retry)
    while any(judged(run).state == "waiting" for run in runs) and not stop.requested():
        failed = _num_failed(runs)
        _launch(ranks, arguments, stop)
        # Only a failed run leaves others to do. Several hosts would restart at different moments and miss each other.
        if _num_failed(runs) == failed or ranks.nnodes > 1:
            break
    return [_ended(judged(run)) for run in runs]


def _launch(ranks: Ranks, arguments: Sequence[str], stop: StopFlag) -> None:
    try:
        # A new session: Ctrl-C reaches only us, and we pass it on once.
        process = subprocess.Popen(ranks.command(arguments), env=ranks.environment(), start_new_session=True)
    except OSError as problem:
        raise OelmError(f"torchrun cannot be started ({problem}); end other processes and repeat") from problem
    is_asked = False
    while process.poll() is None:
        if stop.requested() and not is_asked:
            is_asked = True
            send_stop(process)
        time.sleep(_POLL_S)


def _num_failed(runs: Sequence[PlannedRun]) -> int:
    return sum(judged(run).state == "failed" for run in runs)


def _ended(job: Job) -> Job:
    if job.state == "waiting":
        job.state, job.message = "stopped", "not begun"
    return job


def judged(run: PlannedRun) -> Job:
    """Return the state of a run whose processes have ended, by its status.json."""
    status, job = read_status(run.path), Job(run)
    if status is None or status.status == "queued":
        return job
    if is_done(run):
        job.state = "done"
    elif status.status == "failed":
        job.state, job.message = "failed", status.message
    elif status.status == "stopped":
        job.state, job.message = "stopped", status.message
    else:
        job.state, job.message = "killed", "its first process was killed"
    return job


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

    def _reason_not_to(self, job: Job, lock: FileLock) -> tuple[JobState, str]:
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
