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
from oelm.cli.status import ShownJobs
from oelm.errors import ClusterError, ConfigError
from oelm.experiments.slurm import (
    ClusterConfig,
    Submission,
    ask,
    check_time,
    cluster_config,
    job_states,
    parse_show_job,
    parse_time,
    read_submissions,
)
from oelm.files import write_json
from oelm.runs.find import scan
from oelm.runs.status import now_text, read_status
from tests.cases import case
from tests.experiments.recorded import record
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


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that the PATH leads to first."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def submitted(root: Path, *seeds: int, job: str = "12", experiment: str = "x") -> list[Path]:
    """Write down that runs were submitted; return their folders."""
    members = tuple(f"{experiment}/smoke/default/seed-{seed}" for seed in seeds)
    record = Submission(submitted=now_text(), data_job="11", runs_job=job, report_job="13", members=members)
    write_json(root / ".slurm" / f"00000000-{job}" / "submission.json", record.model_dump(mode="json"))
    return [root / member for member in members]


def noting(programs: Path, name: str, body: str) -> Path:
    """Put a program there that notes its arguments, a line each time; return where."""
    log = programs.parent / f"{name}.log"
    log.touch()
    program(programs, name, f'echo "$*" >> {shlex.quote(str(log))}\n{body}')
    return log


SMOKE = ("run", "mine", "--budget", "smoke", "--slurm")


def test_dry_run_writes_scripts_that_a_shell_understands_and_submits_nothing(place: Path, no_slurm: None) -> None:
    (place / "slurm.yaml").write_text("gres: gpu:1\narray_limit: 8\n")
    words = ("--partition", "gpu", "--time", "8:00:00", "--account", "lab")
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


@pytest.mark.slow
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
    assert "SLURM was not found: no sinfo on the PATH" in said and "--dry-run" in said
    assert not (place / "outputs").exists()


def test_refusal_by_sbatch_is_told_and_leaves_nothing_in_the_queue(place: Path, tmp_path: Path, programs: Path) -> None:
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
    assert "--partition mian: this cluster has no such partition (did you mean 'main'?); it has: main" in wrong


def test_time_below_one_checkpoint_interval_is_refused_before_submission(place: Path) -> None:
    assert "from one checkpoint to the next" in oelm(
        *SMOKE, "--dry-run", "--set", "steps=9000000", "--set", "save_every=9000000", "--time", "10", code=2
    )
    config = ClusterConfig(time="1:00:00", grace_s=180)
    check_time(config, 3000.0, basis="measured here")
    with pytest.raises(ConfigError, match=r"--time 1:00:00 is 3600 s; .* 3500 s .*\(measured here\), and 180 s are reserved"):
        check_time(config, 3500.0, basis="measured here")


def test_options_of_slurm_without_it_are_a_mistake(place: Path) -> None:
    assert "--time is SLURM's: add --slurm" in oelm("run", "mine", "--budget", "smoke", "--time", "10", code=2)


def test_times_are_read_as_sbatch_reads_them() -> None:
    cases: list[tuple[str, int]] = [
        ("90", 5400),
        ("90:30", 5430),
        ("8:00:00", 28_800),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("2-00:00:01", 172_801),
    ]
    for text, seconds in cases:
        with case(text, seconds):
            assert parse_time(text) == seconds


def test_other_times_are_refused() -> None:
    for text in ("", "8h", "1:2:3:4", "-5", "1.5", "8:00:00; rm -rf /", "$(id)"):
        with case(text):
            with pytest.raises(ValueError, match="write a time as"):
                parse_time(text)


def test_users_file_and_the_command_add_up(place: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / "oelm").mkdir(parents=True)
    (tmp_path / "home" / "oelm" / "slurm.yaml").write_text("partition: gpu\naccount: lab\nmodules: [cuda/12.4, gcc]\n")
    config = cluster_config({"partition": "long", "time": None})
    assert (config.partition, config.account, config.modules) == ("long", "lab", ("cuda/12.4", "gcc"))
    # The one in the working folder stands for it.
    (place / "slurm.yaml").write_text("partition: here\n")
    assert cluster_config({}).partition == "here" and cluster_config({}).account is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("partitoin: gpu\n", "slurm.yaml:1: unknown key 'partitoin' (did you mean 'partition'?)"),
        ("account: lab\npartition: a b\n", "slurm.yaml:2: partition: 'a b': use letters, digits"),
        ('modules: ["x; touch pwned"]\n', "modules: 'x; touch pwned': use letters, digits"),
        ('partition: "gpu\\n#SBATCH --uid=0"\n', "letters, digits"),
        ("cpus_per_task: many\n", "slurm.yaml:1: cpus_per_task"),
        ("time: soon\n", "slurm.yaml:1: time: 'soon': write a time as"),
    ],
)
def test_mistakes_in_the_users_file_are_told_with_their_line(text: str, words: str, place: Path) -> None:
    (place / "slurm.yaml").write_text(text)
    with pytest.raises(ConfigError) as told:
        cluster_config({})
    assert words in str(told.value)


def test_states_come_from_squeue_then_sacct_then_the_controller(tmp_path: Path, programs: Path) -> None:
    root = tmp_path / "outputs"
    runs = submitted(root, 0, 1, 2, 3)
    # As Debian's SLURM 22.05 prints them.
    program(programs, "squeue", "printf '12_2|RUNNING|None\\n12_3|PENDING|Resources\\n13|PENDING|Dependency\\n'")
    program(programs, "sacct", "printf '12_0|COMPLETED\\n12_1|CANCELLED by 0\\n'")
    said = {path.name: str(state) for path, state in job_states(root, runs).items()}
    assert said == {
        "seed-0": "12_0 COMPLETED",
        "seed-1": "12_1 CANCELLED",
        "seed-2": "12_2 RUNNING",
        "seed-3": "12_3 PENDING (Resources)",
    }
    program(programs, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    line = "JobId=14 ArrayJobId=12 ArrayTaskId=0 JobName=oelm-runs JobState=FAILED Reason=NonZeroExitCode Requeue=1"
    program(programs, "scontrol", f"echo '{line}'")
    assert str(job_states(root, runs)[runs[0]]) == "12_0 FAILED"
    assert parse_show_job("JobId=15 ArrayJobId=12 ArrayTaskId=2-3 JobState=PENDING\nno such line\n") == {}


def test_where_nothing_was_submitted_slurm_is_not_asked(tmp_path: Path, no_slurm: None) -> None:
    assert job_states(tmp_path, [tmp_path / "x"]) == {}
    with pytest.raises(ClusterError, match="SLURM was not found"):
        ask("squeue")


def test_runs_are_not_submitted_while_slurm_does_not_say_what_is_in_a_job(place: Path, programs: Path) -> None:
    program(programs, "sinfo", "echo main")
    for name, body in (("sacct", "exit 1"), ("scontrol", "exit 1"), ("sbatch", "echo Submitted batch job 77")):
        program(programs, name, body)
    submitted(place / "outputs", 0, job="12", experiment="mine-01")
    submitted(place / "outputs", 0, job="14", experiment="mine-02")
    program(programs, "squeue", "echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1")
    assert "squeue refused: slurm_load_jobs error: Socket timed out" in oelm(*SMOKE, code=3)
    assert len(read_submissions(place / "outputs")) == 2
    # What is only written down cannot be there twice.
    assert "written, not submitted" in oelm(*SMOKE, "--dry-run")
    program(programs, "squeue", "printf '12_0|RUNNING|None\\n'")
    assert "submitted 1 run as job 77" in oelm(*SMOKE)
    assert read_submissions(place / "outputs")[-1].members == ("mine-02/smoke/default/seed-0",)


def test_only_the_newest_jobs_of_the_runs_in_question_are_asked_for(tmp_path: Path, programs: Path) -> None:
    root = tmp_path / "outputs"
    first, second, *_ = submitted(root, 0, 1, job="12")
    submitted(root, 1, job="14")
    squeue, sacct = noting(programs, "squeue", ""), noting(programs, "sacct", "printf '14_0|FAILED\\n'")
    assert {path.name: str(state) for path, state in job_states(root, [second]).items()} == {"seed-1": "14_0 FAILED"}
    assert job_states(root, [tmp_path / "another"]) == job_states(root, []) == {}
    assert [line.split()[-1] for line in squeue.read_text().splitlines()] == ["--jobs=14"]
    assert [line.split()[-1] for line in sacct.read_text().splitlines()] == ["--jobs=14"]
    job_states(root, [first, second])
    assert squeue.read_text().splitlines()[-1].endswith(" --jobs=12,14")


def test_a_job_that_squeue_has_forgotten_hides_none_that_is_there(tmp_path: Path, programs: Path) -> None:
    root = tmp_path / "outputs"
    runs = [*submitted(root, 0, job="12"), *submitted(root, 1, job="14")]
    unknown = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    squeue = noting(programs, "squeue", f'case "$*" in *=14) printf "14_0|RUNNING|None\\n";; *) {unknown};; esac')
    program(programs, "sacct", "printf '12_0|COMPLETED\\n'")
    assert sorted(str(state) for state in job_states(root, runs).values()) == ["12_0 COMPLETED", "14_0 RUNNING"]
    assert sorted(line.split()[-1] for line in squeue.read_text().splitlines()) == ["--jobs=12", "--jobs=12,14", "--jobs=14"]


def test_status_asks_slurm_twice_a_minute_and_not_of_finished_runs(tmp_path: Path, programs: Path) -> None:
    moments = [0.0]
    record(tmp_path, "queued", experiment="x", seed=0)
    record(tmp_path, "done", experiment="x", seed=1)
    submitted(tmp_path, 0, job="12")
    submitted(tmp_path, 1, job="14")
    squeue = noting(programs, "squeue", "printf '12_0|PENDING|Priority\\n'")
    jobs, views = ShownJobs(tmp_path, clock=lambda: moments[-1]), scan(tmp_path)
    for moment in (0.0, 2.0, 29.0, 31.0, 60.0):
        moments.append(moment)
        assert {path.name: str(state) for path, state in jobs.of(views).items()} == {"seed-0": "12_0 PENDING (Priority)"}
    assert [line.split()[-1] for line in squeue.read_text().splitlines()] == ["--jobs=12"] * 2
    program(programs, "squeue", "exit 1")
    moments.append(100.0)
    assert len(jobs.of(views)) == 1
    assert "12_0" not in oelm("status", "--out", str(tmp_path))


def test_stop_says_when_it_cannot_ask_slurm_and_stops_the_rest(tmp_path: Path, programs: Path) -> None:
    run = record(tmp_path, "queued", experiment="x")
    submitted(tmp_path, 0)
    program(programs, "squeue", "exit 1")
    said = oelm("stop", "x", "--out", str(tmp_path))
    assert "jobs of SLURM are left alone: squeue refused: exit code 1" in said and "taken off the queue" in said
    assert (status := read_status(run)) is not None and status.status == "stopped"
