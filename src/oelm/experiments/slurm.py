"""Runs on a SLURM cluster: submitted as job arrays, looked at with squeue and sacct, cancelled with scancel.

Not through submitit: it hands jobs over as pickles, and what unpickles runs code; a script that one can read does as well.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from oelm.errors import ClusterError, ConfigError, suggest
from oelm.experiments.cluster import ClusterConfig
from oelm.experiments.plan import PlannedRun
from oelm.experiments.sbatch import runs_script, single_script
from oelm.files import write_json, write_text
from oelm.strict import Strict
from oelm.train.status import now_text

FOLDER, RECORD = ".slurm", "submission.json"
# States of a job that is still to do something; every other one is an end.
ACTIVE = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "STOPPED")
_PATIENCE_S = 30.0
_JOB = re.compile(r"Submitted batch job (\d+)")
_FIELD = re.compile(r"(\w+)=(\S+)")


class Submission(Strict):
    """`submission.json`: the jobs of one `oelm run --slurm`, and which run each member of the array is."""

    submitted: str
    data_job: str
    runs_job: str
    report_job: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class JobState:
    """What SLURM says of the job that a run belongs to: its id, its state in SLURM's words, and why it waits."""

    job: str
    state: str
    reason: str = ""

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    def __str__(self) -> str:
        return f"{self.job} {self.state}" + (f" ({self.reason})" if self.reason and self.state == "PENDING" else "")


def ask(*command: str) -> str:
    """Return what a command of SLURM's prints; ClusterError where it is not there, hangs or refuses."""
    if shutil.which(command[0]) is None:
        raise ClusterError(
            f"SLURM is not here: there is no {command[0]} on the PATH. Log in where jobs are submitted, or leave --slurm out; "
            "with --dry-run the scripts are written without it"
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ClusterError(f"{command[0]} gave no answer ({problem}); is the SLURM controller up? `sinfo` tells") from problem
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise ClusterError(f"{command[0]} refused: {said}; mend that, or write the scripts only, with --dry-run")
    return done.stdout


def check_partition(config: ClusterConfig) -> None:
    """Raise ConfigError when the cluster has no partition of the name that was given."""
    there = sorted({line.strip() for line in ask("sinfo", "--noheader", "--format=%R").splitlines() if line.strip()})
    for name in (config.partition, config.cpu_partition):
        for part in name.split(",") if name is not None else ():
            if part not in there:
                hint = suggest(part, there)
                raise ConfigError(
                    f"--partition {part}: this cluster has no such partition{hint}; there are: {', '.join(there)}"
                )


def check_time(config: ClusterConfig, interval_s: float, *, basis: str) -> None:
    """Raise ConfigError when a job would end before its first checkpoint, which takes about `interval_s`."""
    limit_s = config.time_s
    if limit_s is not None and limit_s < interval_s + config.grace_s:
        raise ConfigError(
            f"--time {config.time} is {limit_s} s; from one checkpoint to the next a run takes about {interval_s:.0f} s "
            f"({basis}) and {config.grace_s} s are kept for saving: it would get nowhere. Ask for more time, save more often "
            "(--set save_every=N), or --no-preflight if you know better"
        )


@dataclass(frozen=True)
class Jobs:
    """What is to be submitted: the runs, the options they share, and the commands before and after them."""

    runs: Sequence[PlannedRun]
    options: Sequence[str]
    data: Sequence[str]
    report: Sequence[str]


def submission_folder(root: Path, runs: Sequence[PlannedRun]) -> Path:
    """Return a new folder for a submission's scripts, logs and record."""
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    digest = hashlib.sha256("\n".join(str(run.path) for run in runs).encode()).hexdigest()
    return root / FOLDER / f"{moment}-{digest[:6]}"


def write_scripts(jobs: Jobs, config: ClusterConfig, folder: Path) -> tuple[Path, Path, Path]:
    """Write the scripts of a submission: data, runs, report."""
    place = folder.absolute()
    texts = {
        "data": single_script("data", "Prepares what the runs read.", jobs.data, config, folder=place),
        "runs": runs_script(jobs.runs, jobs.options, config, folder=place),
        "report": single_script("report", "Reports on the runs.", jobs.report, config, folder=place),
    }
    for name, text in texts.items():
        write_text(folder / f"{name}.sbatch", text)
    return folder / "data.sbatch", folder / "runs.sbatch", folder / "report.sbatch"


def submit(jobs: Jobs, config: ClusterConfig, root: Path) -> tuple[Path, Submission]:
    """Submit data, then the array of runs, then the report, each waiting for the one before; all of them or none."""
    folder = submission_folder(root, jobs.runs)
    data, runs, report = write_scripts(jobs, config, folder)
    submitted: list[str] = []
    try:
        submitted.append(_sbatch(data))
        # A job whose data cannot be had shall not wait for ever.
        submitted.append(_sbatch(runs, f"--dependency=afterok:{submitted[0]}", "--kill-on-invalid-dep=yes"))
        submitted.append(_sbatch(report, f"--dependency=afterany:{submitted[1]}"))
    except ClusterError:
        if submitted:
            with contextlib.suppress(ClusterError):
                ask("scancel", *submitted)
        raise
    members = tuple(run.path.relative_to(root).as_posix() for run in jobs.runs)
    data_job, runs_job, report_job = submitted
    record = Submission(submitted=now_text(), data_job=data_job, runs_job=runs_job, report_job=report_job, members=members)
    write_json(folder / RECORD, record.model_dump(mode="json"))
    return folder, record


def _sbatch(script: Path, *options: str) -> str:
    try:
        said = ask("sbatch", *options, str(script))
    except ClusterError as problem:
        raise ClusterError(f"{problem}. The script is {script}; nothing of this submission is left in the queue") from None
    if (found := _JOB.search(said)) is None:
        raise ClusterError(f"sbatch answered {said.strip()!r} to {script}, which names no job")
    return found[1]


def read_submissions(root: Path) -> list[Submission]:
    """Return what was submitted for runs under a root, oldest first; what cannot be read is passed over."""
    found = []
    for path in sorted((root / FOLDER).glob(f"*/{RECORD}")):
        with contextlib.suppress(OSError, ValidationError):
            found.append(Submission.model_validate_json(path.read_bytes()))
    return found


def job_states(root: Path, runs: Collection[Path]) -> dict[Path, JobState]:
    """Return what SLURM says of the newest job of each of these runs that was submitted; where none was, it is not asked.

    Raises ClusterError where squeue gives no answer: a run may be in a job then, or not.
    """
    newest = {
        root / name: f"{record.runs_job}_{number}"
        for record in read_submissions(root)
        for number, name in enumerate(record.members)
    }
    wanted = {path: newest[path] for path in runs if path in newest}
    if not wanted:
        return {}
    known = queued({_array(job) for job in wanted.values()})
    if gone := {_array(job) for job in wanted.values() if job not in known}:
        known = {**ended(gone), **known}
    return {path: known[job] for path, job in wanted.items() if job in known}


def _array(member: str) -> str:
    return member.split("_")[0]


def queued(jobs: Collection[str]) -> dict[str, JobState]:
    """Return those of these jobs that squeue lists, one entry a member of an array."""
    try:
        return _parsed(ask("squeue", "--noheader", "--array", "--format=%i|%T|%r", f"--jobs={','.join(sorted(jobs))}"))
    except ClusterError as problem:
        # Of a job that is long gone squeue will not hear, but the others beside it may be there.
        if "Invalid job id" not in str(problem):
            raise
    return {member: state for job in jobs for member, state in queued([job]).items()} if len(jobs) > 1 else {}


def ended(jobs: Collection[str]) -> dict[str, JobState]:
    """Return jobs that squeue has forgotten, for display: from sacct, or, without accounts, from the controller's memory."""
    with contextlib.suppress(ClusterError):
        wanted = ",".join(sorted(jobs))
        return _parsed(ask("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", f"--jobs={wanted}"))
    with contextlib.suppress(ClusterError):
        return parse_show_job(ask("scontrol", "--oneliner", "show", "job"))
    return {}


def _parsed(text: str) -> dict[str, JobState]:
    """Parse lines of 'id|state' and perhaps '|reason'; sacct says 'CANCELLED by 0' and the like."""
    found = {}
    for line in text.splitlines():
        job, state, *reason = line.strip().split("|")
        if state:
            found[job] = JobState(job, state.split()[0], reason[0] if reason and reason[0] != "None" else "")
    return found


def parse_show_job(text: str) -> dict[str, JobState]:
    """Parse what `scontrol --oneliner show job` says of members of arrays."""
    found = {}
    for line in text.splitlines():
        facts = dict(_FIELD.findall(line))
        if "ArrayJobId" in facts and facts.get("ArrayTaskId", "").isdecimal():
            job = f"{facts['ArrayJobId']}_{facts['ArrayTaskId']}"
            found[job] = JobState(job, facts.get("JobState", "UNKNOWN"))
    return found


def cancel(states: Mapping[Path, JobState], runs: Collection[Path]) -> dict[Path, JobState]:
    """Take waiting jobs of these runs off SLURM's queue, and ask running ones to save and end; return the active ones."""
    active = {path: state for path, state in states.items() if path in runs and state.is_active}
    for state in active.values():
        # To the script alone, which passes it on: it then does not ask to be queued again.
        how = () if state.state == "PENDING" else ("--batch", "--signal=TERM")
        with contextlib.suppress(ClusterError):
            ask("scancel", *how, state.job)
    return active
