"""Run `torchrun` as a child process, and read from the runs' records how they ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oelm.data.encode import num_cores
from oelm.errors import ConfigError, OelmError
from oelm.experiments.launch import enqueue, send_stop
from oelm.experiments.plan import PlannedRun
from oelm.experiments.runner import Job, is_done
from oelm.runs.status import read_status
from oelm.train.dist import World
from oelm.train.stop import StopFlag

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
