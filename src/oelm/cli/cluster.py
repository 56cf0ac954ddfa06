"""`oelm run --slurm`: checked, written down, submitted."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from oelm.cli.many import How, same_command
from oelm.cli.shell import counted, out, say
from oelm.errors import ClusterError

if TYPE_CHECKING:
    from oelm.experiments.cluster import ClusterConfig
    from oelm.experiments.plan import PlannedRun
    from oelm.experiments.slurm import Jobs
    from oelm.experiments.study import Study

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
    from oelm.experiments.cluster import cluster_config
    from oelm.experiments.launch import enqueue
    from oelm.experiments.slurm import check_partition, submission_folder, submit, write_scripts

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
    from oelm.train.status import read_status

    open_ = unfinished(runs)
    with contextlib.suppress(ClusterError) if dry_run else contextlib.nullcontext():
        states = job_states(study.root, [run.path for run in open_])
        open_ = [run for run in open_ if run.path not in states or not states[run.path].is_active]
    statuses = {run.path: read_status(run.path) for run in open_}
    return [run for run in open_ if retry or (status := statuses[run.path]) is None or status.status != "failed"]


def _check_time(runs: Sequence[PlannedRun], config: ClusterConfig, root: Path) -> None:
    from oelm.experiments.forecast import Forecaster, run_steps
    from oelm.experiments.projection import FASTEST, interval_s
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
