"""Runs on a SLURM cluster: the user's settings, the scripts, submitting, looking and cancelling.

Not with submitit, which passes jobs as pickles, and unpickling runs code.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from oelm.errors import ClusterError, ConfigError, suggest
from oelm.experiments.catalog import YamlFile, read_yaml
from oelm.experiments.plan import PlannedRun
from oelm.files import Strict, write_json, write_text
from oelm.runs.layout import SUBMISSIONS
from oelm.runs.status import now_text

FILE = "slurm.yaml"
# Values go into a script: each must be one harmless word to the shell and to sbatch.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:,=/+@%-]{0,199}")
_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,6})(?::(\d{1,6}))?(?::(\d{1,2}))?")


def _word(text: str) -> str:
    if not _WORD.fullmatch(text):
        raise ValueError(f"{text!r}: use letters, digits and ._:,=/+@%-, beginning with a letter or digit")
    return text


def _time(text: str) -> str:
    parse_time(text)
    return text


Word = Annotated[str, AfterValidator(_word)]


class ClusterConfig(Strict):
    """`slurm.yaml`: options of sbatch for every job. Fields are described in docs/cluster.md."""

    partition: Word | None = None
    # For jobs without a GPU (preparing data, the report), if `partition` requires one.
    cpu_partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    gres: Word | None = None
    time: Annotated[str, AfterValidator(_time)] | None = None
    cpus_per_task: int = Field(default=1, gt=0, le=1024)
    mem: Word | None = None
    array_limit: int | None = Field(default=None, gt=0)
    modules: tuple[Word, ...] = ()
    # A run is asked to save this long before the time limit; SLURM may be a minute early.
    grace_s: int = Field(default=180, ge=10)

    @property
    def wants_gpu(self) -> bool:
        return self.gres is not None and self.gres.startswith("gpu")

    @property
    def time_s(self) -> int | None:
        return None if self.time is None else parse_time(self.time)


def parse_time(text: str) -> int:
    """Return the seconds of a time of sbatch: minutes, minutes:seconds, h:mm:ss, d-h, d-h:mm or d-h:mm:ss."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r}: write a time as 8:00:00 (h:mm:ss), 90 (minutes) or 1-12 (days-hours)")
    days, *rest = found.groups()
    numbers = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(numbers) == 3:
        return (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    return numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)


def config_path() -> Path | None:
    """Return slurm.yaml of this folder, else of the user's configuration folder, else None."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "oelm"
    return next((path for path in (Path(FILE), home / FILE) if path.is_file()), None)


def cluster_config(changes: dict[str, Any]) -> ClusterConfig:
    """Return slurm.yaml with the changes of the command; ConfigError names file, line and the nearest known key."""
    path = config_path()
    file = read_yaml(path) if path is not None else YamlFile("", {}, {})
    known = list(ClusterConfig.model_fields)
    for key in file.data:
        if key not in known:
            hint = suggest(key, known) or f"; known keys: {', '.join(known)}"
            raise ConfigError(f"{file.where(key)}: unknown key '{key}'{hint}")
    given = {key: value for key, value in changes.items() if value is not None}
    data: dict[str, Any] = {**file.data, **given}
    if isinstance(data.get("modules"), list):
        data["modules"] = tuple(data["modules"])
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as problem:
        error = problem.errors()[0]
        key = str(error["loc"][0])
        where = f"--{key.replace('_', '-')}" if key in given or path is None else file.where(key)
        raise ConfigError(f"{where}: {key}: {str(error['msg']).removeprefix('Value error, ')}") from None


OELM = (sys.executable, "-P", "-m", "oelm")


def runs_script(runs: Sequence[PlannedRun], options: Sequence[str], config: ClusterConfig, *, folder: Path) -> str:
    """Return the script of a job array, one member for each run; `options` of `oelm run` apply to all."""
    array = f"0-{len(runs) - 1}" + (f"%{config.array_limit}" if config.array_limit is not None else "")
    header = [
        *_header("oelm-runs", config, log=folder / "run-%A_%a.log"),
        *_named("gres", config.gres),
        *_named("cpus-per-task", config.cpus_per_task),
        *_named("mem", config.mem),
        *_named("array", array),
        *_named("signal", f"B:USR1@{config.grace_s}"),
        "#SBATCH --requeue",
    ]
    members = "\n".join(f"  {shlex.quote(f'{run.experiment.id} {run.seed}')}" for run in runs)
    where = () if config.wants_gpu or any(option.startswith("--nproc") for option in options) else ("--jobs=1", "--gpus=none")
    command = _command(["run", *options, *where])
    places = {"@command@": command, "@members@": members}
    script = files("oelm.experiments").joinpath("array.sh").read_text(encoding="utf-8")
    # In one pass: what users wrote may look like a place.
    body = re.sub("@(?:command|members)@", lambda found: places[found[0]], script)
    return _script("One member a run. By hand: sbatch runs.sbatch", header, config, body)


def single_script(name: str, why: str, arguments: Sequence[str], config: ClusterConfig, *, folder: Path) -> str:
    """Return the script of a job that needs no GPU: preparing the data, or the report."""
    plain = config.model_copy(update={"partition": config.cpu_partition or config.partition})
    header = [
        *_header(f"oelm-{name}", plain, log=folder / f"{name}-%j.log"),
        *_named("cpus-per-task", config.cpus_per_task),
        *_named("mem", config.mem),
    ]
    return _script(f"{why} By hand: sbatch {name}.sbatch", header, config, f"exec {_command(arguments)}\n")


def _header(name: str, config: ClusterConfig, *, log: Path) -> list[str]:
    return [
        *_named("job-name", name),
        *_named("partition", config.partition),
        *_named("account", config.account),
        *_named("qos", config.qos),
        *_named("constraint", config.constraint),
        *_named("time", config.time),
        *_named("chdir", checked_line(str(Path.cwd()), "the working folder")),
        *_named("output", checked_line(str(log), "the folder of the runs (--out)")),
        "#SBATCH --open-mode=append",
    ]


def _named(option: str, value: object) -> list[str]:
    return [] if value is None else [f"#SBATCH --{option}={shlex.quote(checked_line(str(value), f'--{option}'))}"]


def _command(arguments: Sequence[str]) -> str:
    return shlex.join([checked_line(word, "an argument of the command") for word in (*OELM, *arguments)])


def checked_line(text: str, what: str) -> str:
    """Return a text for a script; raise ConfigError if it has a control character.

    Quotes do not help: an #SBATCH line is a comment to the shell, and what follows a line end in it is a command.
    """
    # Cc: control characters. Zl, Zp: line ends of Unicode. Cs: bytes that are not text.
    odd = [character for character in text if unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")]
    if odd:
        raise ConfigError(
            f"{what} has a control character ({odd[0]!a}) in its name: {text!a}. In a script for SLURM, what follows it could "
            "run as a command; rename it, or start from another folder"
        )
    return text


def _script(what: str, header: Sequence[str], config: ClusterConfig, body: str) -> str:
    loaded = "".join(f"module load {shlex.quote(name)}\n" for name in config.modules)
    threads = 'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"\n'
    lines = "\n".join(header)
    return f"#!/bin/bash\n# Written by `oelm run --slurm`. {what}\n{lines}\n\n{loaded}{threads}\n{body}"


RECORD = "submission.json"
# States of a job that is still to do something; every other one is an end.
ACTIVE = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "STOPPED")
_PATIENCE_S = 30.0
_JOB = re.compile(r"Submitted batch job (\d+)")
_FIELD = re.compile(r"(\w+)=(\S+)")


class Submission(Strict):
    """`submission.json`: the jobs of one `oelm run --slurm`, and the run of each member of the array."""

    submitted: str
    data_job: str
    runs_job: str
    report_job: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class JobState:
    """The job of a run: its id, its state in SLURM's words, and why it waits."""

    job: str
    state: str
    reason: str = ""

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    def __str__(self) -> str:
        return f"{self.job} {self.state}" + (f" ({self.reason})" if self.reason and self.state == "PENDING" else "")


def ask(*command: str) -> str:
    """Return the output of a SLURM command; raise ClusterError if it is missing, hangs or fails."""
    if shutil.which(command[0]) is None:
        raise ClusterError(
            f"SLURM was not found: no {command[0]} on the PATH. Log in where jobs are submitted, or leave --slurm out; "
            "--dry-run writes the scripts without SLURM"
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ClusterError(
            f"{command[0]} gave no answer ({problem}); check with `sinfo` that the SLURM controller is up"
        ) from problem
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise ClusterError(f"{command[0]} refused: {reason}; fix that, or only write the scripts with --dry-run")
    return done.stdout


def check_partition(config: ClusterConfig) -> None:
    """Raise ConfigError if the cluster does not have the given partitions."""
    there = sorted({line.strip() for line in ask("sinfo", "--noheader", "--format=%R").splitlines() if line.strip()})
    for name in (config.partition, config.cpu_partition):
        for part in name.split(",") if name is not None else ():
            if part not in there:
                hint = suggest(part, there)
                raise ConfigError(f"--partition {part}: this cluster has no such partition{hint}; it has: {', '.join(there)}")


def check_time(config: ClusterConfig, interval_s: float, *, basis: str) -> None:
    """Raise ConfigError if a job would end before its first checkpoint, about `interval_s` after its start."""
    limit_s = config.time_s
    if limit_s is not None and limit_s < interval_s + config.grace_s:
        raise ConfigError(
            f"--time {config.time} is {limit_s} s; a run takes about {interval_s:.0f} s from one checkpoint to the next "
            f"({basis}), and {config.grace_s} s are reserved for saving: it would make no progress. Ask for more time, save "
            "more often (--set save_every=N), or skip this check with --no-preflight"
        )


@dataclass(frozen=True)
class Jobs:
    """What to submit: the runs, the options they share, and the commands before and after them."""

    runs: Sequence[PlannedRun]
    options: Sequence[str]
    data: Sequence[str]
    report: Sequence[str]


def submission_folder(root: Path, runs: Sequence[PlannedRun]) -> Path:
    """Return a new folder for a submission's scripts, logs and record."""
    moment = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    digest = hashlib.sha256("\n".join(str(run.path) for run in runs).encode()).hexdigest()
    return root / SUBMISSIONS / f"{moment}-{digest[:6]}"


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
        # If preparing the data fails, the runs must not wait for ever.
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
        answer = ask("sbatch", *options, str(script))
    except ClusterError as problem:
        raise ClusterError(f"{problem}. The script is {script}; nothing of this submission is left in the queue") from None
    if (found := _JOB.search(answer)) is None:
        raise ClusterError(f"sbatch answered {answer.strip()!r} to {script}, without a job id")
    return found[1]


def read_submissions(root: Path) -> list[Submission]:
    """Return the submissions under a root, oldest first, without unreadable ones."""
    found = []
    for path in sorted((root / SUBMISSIONS).glob(f"*/{RECORD}")):
        with contextlib.suppress(OSError, ValidationError):
            found.append(Submission.model_validate_json(path.read_bytes()))
    return found


def job_states(root: Path, runs: Collection[Path]) -> dict[Path, JobState]:
    """Return the newest job of each of these runs; SLURM is not called if none was submitted.

    Raises ClusterError if squeue gives no answer: the runs may or may not be in jobs.
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
    """Return those of these jobs that squeue lists, by member of the array."""
    try:
        return _parsed(ask("squeue", "--noheader", "--array", "--format=%i|%T|%r", f"--jobs={','.join(sorted(jobs))}"))
    except ClusterError as problem:
        # squeue refuses the whole list for one job that it has forgotten: ask for each.
        if "Invalid job id" not in str(problem):
            raise
    return {member: state for job in jobs for member, state in queued([job]).items()} if len(jobs) > 1 else {}


def ended(jobs: Collection[str]) -> dict[str, JobState]:
    """Return jobs that squeue has forgotten, for display: from sacct, or without accounting from scontrol."""
    with contextlib.suppress(ClusterError):
        wanted = ",".join(sorted(jobs))
        return _parsed(ask("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", f"--jobs={wanted}"))
    with contextlib.suppress(ClusterError):
        return parse_show_job(ask("scontrol", "--oneliner", "show", "job"))
    return {}


def _parsed(text: str) -> dict[str, JobState]:
    """Parse lines of 'id|state' and perhaps '|reason'. sacct writes states such as 'CANCELLED by 0'."""
    found = {}
    for line in text.splitlines():
        job, state, *reason = line.strip().split("|")
        if state:
            found[job] = JobState(job, state.split()[0], reason[0] if reason and reason[0] != "None" else "")
    return found


def parse_show_job(text: str) -> dict[str, JobState]:
    """Parse the members of arrays in the output of `scontrol --oneliner show job`."""
    found = {}
    for line in text.splitlines():
        facts = dict(_FIELD.findall(line))
        if "ArrayJobId" in facts and facts.get("ArrayTaskId", "").isdecimal():
            job = f"{facts['ArrayJobId']}_{facts['ArrayTaskId']}"
            found[job] = JobState(job, facts.get("JobState", "UNKNOWN"))
    return found


def cancel(states: Mapping[Path, JobState], runs: Collection[Path]) -> dict[Path, JobState]:
    """Cancel the waiting jobs of these runs, ask running ones to save and end, and return both."""
    active = {path: state for path, state in states.items() if path in runs and state.is_active}
    for state in active.values():
        # To the script alone, which passes it on and does not requeue itself.
        how = () if state.state == "PENDING" else ("--batch", "--signal=TERM")
        with contextlib.suppress(ClusterError):
            ask("scancel", *how, state.job)
    return active
