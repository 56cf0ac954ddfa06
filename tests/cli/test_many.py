"""One run on many processes as users type it: `--nproc`, and torchrun itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.cli.shell import same_command
from oelm.errors import ConfigError
from oelm.experiments.torchrun import Ranks
from oelm.runs.metrics import read_metrics
from oelm.runs.status import read_status
from tests.faults.queues import write_catalog

# A rate at which the loss is no number after a few steps.
DIVERGING = "\nNAME:\n  extends: mine-01\n  groups: [mine]\n  settings: {optim.lr: 1.0e+30, optim.clip_norm: 1.0e+30}\n"
OELM = [sys.executable, "-P", "-m", "oelm"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "oelm"]


@pytest.fixture
def place(text_file: Path, tmp_path: Path) -> Path:
    return write_catalog(tmp_path / "place", text_file)


def say(command: list[str], place: Path, *, code: int | None = 0) -> str:
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=240)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_of(place: Path, name: str) -> Path:
    (folder,) = place.glob(f"outputs/{name}/smoke/*/seed-0")
    return folder


@pytest.mark.slow
def test_one_word_more_puts_each_run_on_two_processes(place: Path) -> None:
    printed = say([*OELM, "run", "mine", "--budget", "smoke", "--nproc", "2"], place)
    assert "2 runs at budget smoke, each on 2 processes" in printed
    # One process speaks.
    assert printed.count("started mine-01 smoke seed 0") == printed.count("[1/2] mine-01") == 1
    assert "bytes of gradients summed in step 1 over 2 processes, 15.17% less" in printed
    for name in ("mine-01", "mine-02"):
        status = read_status(run_of(place, name))
        assert status is not None and (status.status, status.device) == ("done", "cpu x2")
    again = say([*OELM, "run", "mine", "--budget", "smoke", "--nproc", "2"], place)
    assert "started" not in again


@pytest.mark.slow
def test_torchrun_itself_runs_the_same_command(place: Path) -> None:
    printed = say([*TORCHRUN, "run", "mine-01", "--budget", "smoke"], place)
    assert printed.count("started mine-01 smoke seed 0") == 1
    status = read_status(run_of(place, "mine-01"))
    assert status is not None and (status.status, status.device) == ("done", "cpu x2")
    trained = say([*TORCHRUN, "train", "--config", str(run_of(place, "mine-01") / "config.json"), "--out", "alone"], place)
    assert trained.count("done: best PPL") == 1
    first, second = (read_metrics(path / "metrics.jsonl") for path in (place / "alone", run_of(place, "mine-01")))
    assert [row.get("loss") for row in first] == [row.get("loss") for row in second]


@pytest.mark.slow
def test_two_hosts_meet_where_the_command_says(place: Path) -> None:
    """Two launchers, as on two hosts that share a disk."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    meeting = ["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]
    command = [*OELM, "run", "mine-01", "--budget", "smoke", *meeting]
    hosts = [
        subprocess.Popen(command, cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)
    ]
    try:
        printed = [host.communicate(timeout=240)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], printed
    status = read_status(run_of(place, "mine-01"))
    assert status is not None and (status.status, status.device) == ("done", "cpu x2")


@pytest.mark.slow
def test_failed_run_does_not_keep_the_others_from_being_run(place: Path) -> None:
    with (place / "experiments.yaml").open("a") as catalog:
        catalog.write(DIVERGING.replace("NAME", "mine-00"))
    printed = say([*OELM, "run", "mine", "--budget", "smoke", "--nproc", "2"], place, code=3)
    states = {name: read_status(run_of(place, name)) for name in ("mine-00", "mine-01", "mine-02")}
    assert [status.status for status in states.values() if status is not None] == ["failed", "done", "done"]
    assert "1 of 3 runs failed" in printed


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", "oelm stop"])
def test_stop_saves_leaves_with_75_and_the_same_command_goes_on(how: str, place: Path) -> None:
    long = ["--set", "steps=3000", "--set", "save_every=3000", "--set", "eval_every=3000"]
    command = [*OELM, "run", "mine-01", "--budget", "smoke", "--nproc", "2", *long]
    process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 120
        while not any(place.glob("outputs/mine-01/smoke/*/seed-0/metrics.jsonl")) or not read_metrics(
            run_of(place, "mine-01") / "metrics.jsonl"
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        if how == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            say([*OELM, "stop", "mine-01"], place)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 75, printed
    status = read_status(run_of(place, "mine-01"))
    assert status is not None and status.status == "stopped" and 0 < status.step < 3000
    assert json.loads((run_of(place, "mine-01") / "latest.json").read_text())["step"] == status.step


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nproc", "2", "--jobs", "2"), "--nproc gives one run several processes"),
        (("--nproc", "2", "--nnodes", "2"), "give each the same --rdzv-endpoint"),
        (("--nproc", "2", "--rdzv-id", "x"), "are for several hosts"),
        (("--nnodes", "2"), "need --nproc"),
    ],
)
def test_mistakes_start_nothing(arguments: tuple[str, ...], words: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    result = CliRunner().invoke(app, ["run", "mine", "--budget", "smoke", *arguments])
    assert result.exit_code == 2 and words in " ".join(result.output.split())
    assert not (place / "outputs").exists()


def test_batch_that_does_not_divide_fails_with_numbers_that_do(place: Path) -> None:
    odd = ("--set", "batch_size=15", "--set", "micro_batch_size=5")
    printed = say([*OELM, "run", "mine-01", "--budget", "smoke", "--nproc", "2", "--max-restarts", "0", *odd], place, code=2)
    assert "batch_size 15 does not divide among 2 processes; numbers that do: 1, 3, 5, 15" in " ".join(printed.split())
    assert not (place / "outputs").exists()


def test_torchruns_command_has_its_own_words_and_ours_whole() -> None:
    ranks = Ranks(8, nnodes=2, rdzv_endpoint="host:29500", rdzv_id="study", max_restarts=1)
    command = ranks.command(["run", "--set=data.source=a b; c", "--", "GPT-02"])
    assert command[-4:] == ["oelm", "run", "--set=data.source=a b; c", "--", "GPT-02"][-4:]
    assert " ".join(command[command.index("--nnodes") :]).startswith(
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint host:29500 --rdzv-id study --nproc-per-node 8 --max-restarts 1"
    )
    with pytest.raises(ConfigError, match="at least 1"):
        Ranks(0)


def test_command_is_given_again_as_it_was() -> None:
    echo = typer.Typer()

    @echo.command()
    def run(context: typer.Context, ids: list[str], word: list[str] | None = None, loud: bool = False, n: int = 1) -> None:
        typer.echo(json.dumps(same_command(context, without=("n",))))

    result = CliRunner().invoke(echo, ["a b", "--word", "-x=1;2", "--word", "y", "--loud", "--n", "3", "--", "-c"])
    assert json.loads(result.output) == ["run", "--word=-x=1;2", "--word=y", "--loud", "--", "a b", "-c"]


def test_workers_of_other_commands_are_told_to_leave_torchrun_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(app, ["sweep", "GPT-02", "--grid", "optim.lr=0.1,0.2"])
    assert result.exit_code == 2 and "leave it out here" in " ".join(result.output.split())
    assert os.environ["RANK"] == "0"
