"""The scripts that SLURM runs; they can be read, and submitted by hand."""

from __future__ import annotations

import shlex
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from oelm.errors import ConfigError
from oelm.experiments.cluster import ClusterConfig
from oelm.experiments.plan import PlannedRun

OELM = (sys.executable, "-P", "-m", "oelm")
_RUNS = """\
members=(
{members}
)
read -r experiment seed <<< "${{members[$SLURM_ARRAY_TASK_ID]}}"

{command} --no-baseline --seeds="$seed-$seed" -- "$experiment" &
child=$!

# SLURM sends USR1 some time before the limit: the run saves, and the job is queued again; it continues where it was.
# TERM means cancelled or preempted: the run saves, and it is SLURM that queues a preempted job again.
again=no
woken=yes
trap 'again=yes; woken=yes; kill -TERM "$child"' USR1
trap 'woken=yes; kill -TERM "$child"' TERM INT
while [ "$woken" = yes ]; do
  woken=no
  wait "$child"
  now=$?
  [ "$now" -eq 127 ] || code=$now
done

# 75: stopped and saved.
if [ "$again" = yes ] && [ "$code" -eq 75 ]; then
  echo "near the time limit: saved, queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


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
    body = _RUNS.format(members=members, command=command)
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
