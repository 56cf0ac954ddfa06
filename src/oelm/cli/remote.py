"""Runs on many processes or a cluster, from the command line: torchrun, `--nproc`, `--slurm`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from oelm.cli.queue import QueueView
from oelm.cli.shell import TerminalWatch, err, out, print_problem, printable, quiet_unless_first, same_command, say
from oelm.errors import DONE, REFUSED, STOPPED, ClusterError, ConfigError, OelmError, RankLostError
from oelm.process import is_one_of_many
from oelm.text import counted

if TYPE_CHECKING:
    from oelm.config import TrainConfig
    from oelm.experiments.plan import PlannedRun
    from oelm.experiments.queue import Job
    from oelm.experiments.slurm import ClusterConfig, Jobs
    from oelm.experiments.study import Study
    from oelm.experiments.torchrun import Ranks
    from oelm.process import StopFlag
    from oelm.train.dist import World
    from oelm.train.track import TrackerName


_OF_TORCHRUN = ("nproc", "nnodes", "rdzv_endpoint", "rdzv_id", "max_restarts")


@dataclass(frozen=True)
class How:
    """How the runs of a study are run, as opposed to which."""

    stop: StopFlag
    retry: bool = False
    preflight: bool = True
    track: TrackerName | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The options to pass to a run's own process."""
        return (() if self.track is None else (f"--track={self.track}",)) + (() if self.preflight else ("--no-preflight",))


def refuse_worker(command: str) -> None:
    """Raise ConfigError where torchrun would start a command many times over that is made for one process."""
    if is_one_of_many():
        raise ConfigError(f"`oelm {command}` is one process; torchrun is for `oelm run` and `oelm train`: leave it out here")


@contextlib.contextmanager
def world_of(config: TrainConfig) -> Iterator[World]:
    """Join the processes that torchrun started, and leave the command with them."""
    from oelm.train.device import choose_compute
    from oelm.train.dist import joined

    quiet_unless_first()
    code, is_lost = DONE, False
    try:
        with joined(choose_compute(config.device, config.precision).device) as world, world.guarded():
            yield world
    except OelmError as problem:
        print_problem(problem)
        code, is_lost = problem.exit_code, isinstance(problem, RankLostError)
    except typer.Exit as ended:
        code = ended.exit_code
    leave(code, is_lost=is_lost)


def run_by_ranks(
    context: typer.Context, study: Study, runs: Sequence[PlannedRun], ranks: Ranks, how: How, *, notify: Path | None = None
) -> list[Job]:
    """Let torchrun bring a study's runs to their end, each on several processes."""
    from oelm.experiments.notify import notify_ended, notify_failed, notifying
    from oelm.experiments.torchrun import run_by_torchrun

    arguments = same_command(context, without=(*_OF_TORCHRUN, "retry", "notify"))
    where = printable(str(study.root))
    out.print(
        f"{counted(len(runs), 'run')} at budget {study.budget}, each on {ranks.nproc * ranks.nnodes} processes; in {where}"
    )
    with notifying(notify) as notifier:
        jobs = run_by_torchrun(runs, study.root, ranks, arguments, stop=how.stop, retry=how.retry)
        if notifier is not None:
            for job in jobs:
                notify_failed(notifier, job)
            notify_ended(notifier, jobs)
    return jobs


def work_together(study: Study, runs: Sequence[PlannedRun], how: How) -> NoReturn:
    """Be one of the processes that torchrun started for a study: train its runs one after the other, and leave."""
    from oelm.experiments.study import prepare_study
    from oelm.experiments.torchrun import Together
    from oelm.train.run import Options

    if how.track is not None:
        raise ConfigError("--track is for runs on one process each; leave it out, metrics.jsonl holds the same numbers")
    with world_of(runs[0].config) as world, TerminalWatch() as terminal, QueueView(len(runs), 1, {}) as view:
        unready: dict[Path, str] = {}
        with world.writer_first():
            if world.is_writer:
                given: dict[str, Any] = {"preflight": how.preflight, "retry": how.retry, "stop": how.stop}
                unready = prepare_study(runs, folder=study.copies, watch=terminal, **given)
        queue = Together(
            runs,
            study.root,
            world,
            stop=how.stop,
            watch=view,
            run_watch=terminal,
            retry=how.retry,
            options=Options(preflight=how.preflight),
            unready=unready,
        )
        raise typer.Exit(code_of(queue.run()))
    raise AssertionError("a process of torchrun's leaves with its world")


def code_of(jobs: Sequence[Job]) -> int:
    """Return the exit code that tells how a queue ended."""
    if any(job.state == "failed" for job in jobs):
        return REFUSED
    return STOPPED if any(job.state in ("stopped", "killed", "left", "waiting") for job in jobs) else DONE


def leave(code: int, *, is_lost: bool = False) -> NoReturn:
    """End one of many processes: at once, as gloo's threads may outlive what they belong to at the interpreter's end."""
    out.file.flush()
    err.file.flush()
    # torchrun takes any other code for a lost process and begins again, which no stop and no refusal wants.
    is_restarted = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    os._exit(0 if is_restarted and not is_lost else code)


# What is SLURM's, what differs between members, and what is done once, before.
_NOT_OF_MEMBERS = ("ids", "seeds", "no_baseline", "retry", "jobs", "gpus", "dry_run", "prepare_only")
_OF_SLURM = ("slurm", "partition", "account", "time")


def submit_study(
    context: typer.Context,
    study: Study,
    runs: Sequence[PlannedRun],
    wishes: Mapping[str, str | None],
    how: How,
    *,
    dry_run: bool,
) -> None:
    """Submit what is left of a study: its data, its runs as a job array, its report; with `dry_run`, write the scripts only."""
    from oelm.experiments.queue import enqueue
    from oelm.experiments.slurm import check_partition, cluster_config, submission_folder, submit, write_scripts

    config = cluster_config(dict(wishes))
    if not dry_run:
        check_partition(config)
    left = _left(study, runs, retry=how.retry, dry_run=dry_run)
    if not left:
        out.print("nothing to submit: every run is done, failed (see --retry), or in a job already; `oelm status` shows which")
        return
    if how.preflight:
        _check_time(left, config, study.root)
    jobs = _jobs(context, study, left)
    if dry_run:
        folder = submission_folder(study.root, left)
        paths = write_scripts(jobs, config, folder)
        say(paths[1].read_text())
        say(f"written, not submitted: {', '.join(str(path) for path in paths)}")
        return
    folder, record = submit(jobs, config, study.root)
    # Only now: what SLURM refused is not queued. Runs come after the data, so that none has begun yet.
    for run in left:
        enqueue(run, study.root, retry=how.retry)
    say(
        f"submitted {counted(len(left), 'run')} as job {record.runs_job}, after job {record.data_job} (data), before job "
        f"{record.report_job} (report); scripts and logs in {folder}. `oelm status` shows them, `oelm stop` cancels"
    )


def _left(study: Study, runs: Sequence[PlannedRun], *, retry: bool, dry_run: bool) -> list[PlannedRun]:
    """Return the runs to be submitted: not done, not failed unless they are to be retried, and in no job yet.

    Raises ClusterError where SLURM does not say what is in a job, unless nothing is submitted.
    """
    from oelm.experiments.slurm import job_states
    from oelm.experiments.study import unfinished
    from oelm.runs.status import read_status

    open_ = unfinished(runs)
    with contextlib.suppress(ClusterError) if dry_run else contextlib.nullcontext():
        states = job_states(study.root, [run.path for run in open_])
        open_ = [run for run in open_ if run.path not in states or not states[run.path].is_active]
    statuses = {run.path: read_status(run.path) for run in open_}
    return [run for run in open_ if retry or (status := statuses[run.path]) is None or status.status != "failed"]


def _check_time(runs: Sequence[PlannedRun], config: ClusterConfig, root: Path) -> None:
    from oelm.experiments.forecast import FASTEST, Forecaster, interval_s, run_steps
    from oelm.experiments.slurm import check_time

    if config.time_s is None:
        return
    forecaster = Forecaster(root, threads=config.cpus_per_task)
    arms = {(run.experiment.id, run.variant): run for run in runs}
    for run in arms.values():
        forecast = forecaster.forecast(run)
        if forecast.seconds is not None and (forecast.basis == "measured" or not config.wants_gpu):
            steps = run_steps(run.config)
            seconds, basis = forecast.seconds * (run.config.save_every or steps) / steps, f"{forecast.basis} here"
            check_time(config, seconds, basis=basis)
        # Of a GPU that is not here, only what the fastest one could not do either is refused.
        elif (projected := interval_s(run, efficiency=1.0)) is not None:
            check_time(config, projected, basis=f"on paper, on a {FASTEST.name} at its data sheet's speed")


def _jobs(context: typer.Context, study: Study, runs: Sequence[PlannedRun]) -> Jobs:
    from oelm.experiments.slurm import Jobs

    shared = same_command(context, without=(*_OF_SLURM, *_NOT_OF_MEMBERS))
    data = same_command(context, without=(*_OF_SLURM, "retry", "dry_run", "jobs", "gpus", "nproc", "prepare_only"))
    ids = sorted({run.experiment.id for run in runs})
    where: list[Any] = [f"--out={study.root}", f"--budget={study.budget}"]
    if context.params.get("catalog") is not None:
        where.append(f"--catalog={context.params['catalog']}")
    report = ["report", *where, f"--html={study.root / 'report.html'}", "--", *ids]
    return Jobs(runs, shared[1:-1], [data[0], "--prepare-only", *data[1:]], report)
