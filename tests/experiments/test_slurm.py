"""What is said to SLURM and what it says, without one: scripts, settings, mistakes. With a real one: tests/slurm."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.errors import ClusterError, ConfigError
from oelm.experiments.cluster import ClusterConfig, cluster_config, parse_time
from oelm.experiments.slurm import Submission, ask, check_time, job_states, parse_show_job, read_submissions
from oelm.files import write_json
from oelm.train.status import now_text, read_status
from tests.faults.queues import write_catalog


@pytest.fixture
def place(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = write_catalog(tmp_path / "place with space", text_file)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


def program(folder: Path, name: str, body: str) -> None:
    """Put a program of SLURM's name where the PATH leads: what a real one printed, or how it failed."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def oelm(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


SMOKE = ("run", "mine", "--budget", "smoke", "--slurm")


def test_dry_run_writes_scripts_that_a_shell_understands_and_submits_nothing(place: Path, no_slurm: None) -> None:
    words = ("--partition", "gpu", "--gres", "gpu:1", "--time", "8:00:00", "--array-limit", "8", "--account", "lab")
    said = oelm(*SMOKE, "--seeds", "2", "--set", "optim.weight_decay=0.1", "--dry-run", *words)
    assert "written, not submitted" in said
    (folder,) = (place / "outputs" / ".slurm").iterdir()
    text = (folder / "runs.sbatch").read_text()
    for line in ("--array=0-3%8", "--partition=gpu", "--gres=gpu:1", "--time=8:00:00", "--account=lab", "--signal=B:USR1@180"):
        assert f"#SBATCH {line}\n" in text
    assert f"#SBATCH --chdir={shlex.quote(str(place))}\n" in text
    assert "#SBATCH --requeue" in text and "  'mine-01 0'\n  'mine-02 0'\n  'mine-01 1'\n  'mine-02 1'\n" in text
    assert '--set=optim.weight_decay=0.1 --no-baseline --seeds="$seed-$seed" -- "$experiment" &' in text
    for script in folder.glob("*.sbatch"):
        subprocess.run(["/bin/bash", "-n", str(script)], check=True)
    assert "--prepare-only" in (folder / "data.sbatch").read_text()
    assert not list((place / "outputs").glob("mine*"))


def test_members_continue_the_runs_of_the_command_that_submitted_them(place: Path) -> None:
    """The member's own command, as the script has it, by hand."""
    oelm(*SMOKE, "--dry-run")
    (script,) = place.glob("outputs/.slurm/*/runs.sbatch")
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["/bin/bash", str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    status = read_status(place / "outputs" / "mine-02" / "smoke" / "default" / "seed-0")
    assert status is not None and status.status == "done"
    assert not (place / "outputs" / "mine-01").exists()


def test_without_slurm_the_command_says_so(place: Path, no_slurm: None) -> None:
    said = oelm(*SMOKE, code=3)
    assert "SLURM is not here: there is no sinfo on the PATH" in said and "--dry-run" in said
    assert not (place / "outputs").exists()


def test_refusal_by_sbatch_is_told_and_leaves_nothing_in_the_queue(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    program(programs, "sinfo", "echo main")
    program(programs, "squeue", "true")
    program(programs, "sacct", "exit 1")
    program(programs, "scontrol", "exit 1")
    # The data's job is taken, the array is not.
    program(
        programs,
        "sbatch",
        'case "$*" in *data.sbatch*) echo "Submitted batch job 41";; '
        '*) echo "sbatch: error: Invalid account or account/partition combination specified" >&2; exit 1;; esac',
    )
    program(programs, "scancel", f'echo "$@" > {shlex.quote(str(tmp_path / "cancelled"))}')
    said = oelm(*SMOKE, code=3)
    assert "sbatch refused: sbatch: error: Invalid account" in said and "nothing of this submission is left" in said
    assert (tmp_path / "cancelled").read_text() == "41\n"
    assert read_submissions(place / "outputs") == []
    wrong = oelm(*SMOKE, "--partition", "mian", code=2)
    assert "--partition mian: this cluster has no such partition (did you mean 'main'?); there are: main" in wrong


def test_time_below_one_checkpoint_interval_is_refused_before_submission(place: Path) -> None:
    assert "from one checkpoint to the next" in oelm(
        *SMOKE, "--dry-run", "--set", "steps=9000000", "--set", "save_every=9000000", "--time", "10", code=2
    )
    config = ClusterConfig(time="1:00:00", grace_s=180)
    check_time(config, 3000.0, basis="measured here")
    with pytest.raises(ConfigError, match=r"--time 1:00:00 is 3600 s; .* about 3500 s \(measured here\) and 180 s are kept"):
        check_time(config, 3500.0, basis="measured here")


def test_options_of_slurm_without_it_are_a_mistake(place: Path) -> None:
    assert "--gres is SLURM's: add --slurm" in oelm("run", "mine", "--budget", "smoke", "--gres", "gpu:1", code=2)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("8:00:00", 28_800), ("1-12", 129_600), ("1-12:30", 131_400), ("2-00:00:01", 172_801)],
)
def test_times_are_read_as_sbatch_reads_them(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "8h", "1:2:3:4", "-5", "1.5", "8:00:00; rm -rf /", "$(id)"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a time is written as"):
        parse_time(text)


def test_users_file_and_the_command_add_up(place: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / "oelm").mkdir(parents=True)
    (tmp_path / "home" / "oelm" / "slurm.yaml").write_text("partition: gpu\naccount: lab\nmodules: [cuda/12.4, gcc]\n")
    config = cluster_config({"partition": "long", "gres": None})
    assert (config.partition, config.account, config.modules) == ("long", "lab", ("cuda/12.4", "gcc"))
    # The one in the working folder stands for it.
    (place / "slurm.yaml").write_text("partition: here\n")
    assert cluster_config({}).partition == "here" and cluster_config({}).account is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("partitoin: gpu\n", "slurm.yaml:1: unknown key 'partitoin' (did you mean 'partition'?)"),
        ("account: lab\npartition: a b\n", "slurm.yaml:2: partition: 'a b': letters, digits"),
        ('modules: ["x; touch pwned"]\n', "modules: 'x; touch pwned': letters, digits"),
        ('partition: "gpu\\n#SBATCH --uid=0"\n', "letters, digits"),
        ("cpus_per_task: many\n", "slurm.yaml:1: cpus_per_task"),
        ("time: soon\n", "slurm.yaml:1: time: 'soon': a time is written as"),
    ],
)
def test_mistakes_in_the_users_file_are_told_with_their_line(text: str, words: str, place: Path) -> None:
    (place / "slurm.yaml").write_text(text)
    with pytest.raises(ConfigError) as told:
        cluster_config({})
    assert words in str(told.value)


def test_states_come_from_squeue_then_sacct_then_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, programs = tmp_path / "outputs", tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    members = tuple(f"x/smoke/default/seed-{seed}" for seed in range(4))
    record = Submission(submitted=now_text(), data_job="11", runs_job="12", report_job="13", members=members)
    write_json(root / ".slurm" / "first" / "submission.json", record.model_dump(mode="json"))
    # As Debian's SLURM 22.05 prints them.
    program(programs, "squeue", "printf '12_2|RUNNING|None\\n12_3|PENDING|Resources\\n13|PENDING|Dependency\\n'")
    program(programs, "sacct", "printf '12_0|COMPLETED\\n12_1|CANCELLED by 0\\n'")
    said = {path.name: str(state) for path, state in job_states(root).items()}
    assert said == {
        "seed-0": "12_0 COMPLETED",
        "seed-1": "12_1 CANCELLED",
        "seed-2": "12_2 RUNNING",
        "seed-3": "12_3 PENDING (Resources)",
    }
    program(programs, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    line = "JobId=14 ArrayJobId=12 ArrayTaskId=0 JobName=oelm-runs JobState=FAILED Reason=NonZeroExitCode Requeue=1"
    program(programs, "scontrol", f"echo '{line}'")
    assert str(job_states(root)[root / members[0]]) == "12_0 FAILED"
    assert parse_show_job("JobId=15 ArrayJobId=12 ArrayTaskId=2-3 JobState=PENDING\nno such line\n") == {}


def test_where_nothing_was_submitted_slurm_is_not_asked(tmp_path: Path, no_slurm: None) -> None:
    assert job_states(tmp_path) == {}
    with pytest.raises(ClusterError, match="SLURM is not here"):
        ask("squeue")
