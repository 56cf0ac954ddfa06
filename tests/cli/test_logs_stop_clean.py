"""`oelm logs`, `stop` and `clean` as a user types them, from another terminal than that of the runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from oelm.runs.status import read_status
from tests.cli.watching import PROGRAM, oelm, screen
from tests.conftest import tiny_settings
from tests.experiments.recorded import record
from tests.faults.harness import start


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, with the default place for runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def test_logs_shows_the_last_lines_of_the_run_that_was_alive_last(root: Path) -> None:
    for seed, beat in ((0, "2026-01-01T00:00:00+00:00"), (1, "2026-01-03T00:00:00+00:00"), (2, "2026-01-02T00:00:00+00:00")):
        run = record(root, "stopped", seed=seed, heartbeat=beat)
        (run / "training.log").write_text("".join(f"line {n} of seed {seed}\n" for n in range(100)))
    record(root, "queued", seed=3)
    result = oelm("logs", "gpt-02", "-n", 2)
    assert result.stdout == "line 98 of seed 1\nline 99 of seed 1\n"
    assert "seed-1, stopped; 3 more match" in result.stderr
    assert oelm("logs", "GPT-02", "--seed", 0, "-n", 1).stdout == "line 99 of seed 0\n"
    assert oelm("logs", root / "GPT-02/smoke/default/seed-2", "-n", 1).stdout == "line 99 of seed 2\n"
    assert len(oelm("logs", "GPT-02").stdout.splitlines()) == 40
    assert oelm("logs", "GPT-02", "-n", 0).stdout == ""


def test_a_line_longer_than_a_block_is_printed_whole(root: Path) -> None:
    run = record(root, "stopped")
    (run / "training.log").write_text("first\n" + "x" * 200_000 + "\nlast without end")
    assert oelm("logs", "GPT-02", "-n", 2).stdout == "x" * 200_000 + "\nlast without end\n"


@pytest.mark.parametrize(
    ("said", "step", "own", "shown"),
    [
        ("failed", 0, "begun\n", "printed"),
        ("failed", 0, None, "printed"),
        ("failed", 9, "begun\n", "begun"),
        ("stopped", 9, "", "printed"),
    ],
)
def test_a_run_that_failed_before_it_began_shows_what_it_printed(
    root: Path, said: Any, step: int, own: str | None, shown: str
) -> None:
    run = record(root, said, step=step)
    (run / "console.log").write_text("printed\n")
    if own is not None:
        (run / "training.log").write_text(own)
    assert oelm("logs", "GPT-02").stdout == f"{shown}\n"


def test_a_run_without_a_log_says_so(root: Path) -> None:
    record(root, "queued")
    result = oelm("logs", "GPT-02")
    assert result.stdout == "" and "no log yet; the run is queued" in result.stderr


def test_options_that_match_no_run_are_told_what_there_is(root: Path) -> None:
    record(root, "done")
    assert "GPT-02/smoke/default/seed-0" in oelm("logs", "GPT-02", "--seed", 5, code=3).stderr
    assert "No runs of GPT-02 at paper" in oelm("logs", "GPT-02", "--budget", "paper", code=3).stderr


def test_following_prints_what_comes_and_ends_with_the_run(root: Path) -> None:
    run = record(root, "queued")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "logs", "GPT-02", "--follow"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def live() -> None:
        with (run / "training.log").open("w") as log:
            for n in range(3):
                log.write(f"line {n}\nhalf of")
                log.flush()
                time.sleep(0.3)
                log.write(" a line\n")
        record(root, "done")

    (run / "console.log").write_text("printed\n")
    assert process.stdout is not None
    # However long it takes to start: from here on it follows.
    first = process.stdout.readline()
    writer = threading.Thread(target=live)
    writer.start()
    out, err = process.communicate(timeout=60)
    writer.join()
    assert process.returncode == 0 and "the run is done" in err
    assert first + out == "printed\n" + "".join(f"line {n}\nhalf of a line\n" for n in range(3))


def test_following_shows_half_a_line_that_a_run_ended_with(root: Path) -> None:
    (record(root, "stopped") / "training.log").write_text("one\nhalf of")
    assert oelm("logs", "GPT-02", "--follow").stdout == "one\nhalf of\n"


@pytest.mark.parametrize(("there", "comes", "line"), [("", "two\n", "two"), ("half of", " a line\n", "half of a line")])
def test_following_prints_whole_lines_and_ends_well_with_an_interrupt(root: Path, there: str, comes: str, line: str) -> None:
    run = record(root, "running", host="elsewhere")
    (run / "training.log").write_text(f"one\n{there}")
    with screen("logs", "GPT-02", "--follow") as terminal:
        place = terminal.wait_for("one")
        with (run / "training.log").open("a") as log:
            log.write(comes)
        terminal.wait_for(line, after=place)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0


@pytest.mark.parametrize("name", ["stop", "clean"])
@pytest.mark.parametrize("arguments", [[], ["GPT-02", "--all"]])
def test_stop_and_clean_want_names_or_all(root: Path, name: str, arguments: list[str]) -> None:
    record(root, "done")
    assert "--all" in oelm(name, *arguments, code=2).stderr


def test_stop_ends_running_runs_and_takes_queued_ones_off(root: Path, text_file: Path) -> None:
    run = root / "GPT-02/smoke/default/seed-0"
    child = start(tiny_settings(text_file, steps=100_000, eval_every=1000, save_every=1000), run)
    try:
        while not (run / "metrics.jsonl").exists():
            time.sleep(0.01)
        record(root, "queued", seed=1)
        record(root, "running", seed=2, host="elsewhere")
        record(root, "done", seed=3)
        shown = oelm("stop", "GPT-02").stdout
        child.join(timeout=30)
        assert child.exitcode == 75
    finally:
        child.kill()
        child.join()
    said = read_status(run)
    assert said is not None and f"seed-0: stopped at step {said.step}" in shown
    assert "seed-1: taken off the queue" in shown and "seed-2: runs on elsewhere, left alone" in shown and "seed-3" not in shown


def test_stop_says_that_there_is_nothing_to_stop(root: Path) -> None:
    assert "No runs under outputs" in oelm("stop", "--all").stdout
    record(root, "done")
    assert "nothing to stop" in oelm("stop", "--all").stdout


def test_clean_lists_first_and_deletes_when_told(root: Path) -> None:
    run = record(root, "done")
    (run / "thesis.tex").write_text("precious")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-00000004").mkdir()
    (run / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"x" * 1000)
    record(root, "running", seed=1, host="elsewhere")
    listed = oelm("clean", "--all", "--weights").stdout
    assert "would delete the weights of 1 run: 1,000 bytes; nothing was deleted, --yes does it" in listed
    assert "deleted the weights of 1 run: 1,000 bytes" in oelm("clean", "--all", "--weights", "--yes").stdout
    listed = oelm("clean", "gpt-02").stdout
    assert "left there, not written by oelm: thesis.tex" in listed and "seed-1: left alone: in use; stop it first" in listed
    assert (run / "config.json").exists()
    assert "deleted 1 run" in oelm("clean", "gpt-02", "--yes").stdout
    assert [path.name for path in run.iterdir()] == ["thesis.tex"]


def test_clean_keeps_to_its_budget(root: Path) -> None:
    record(root, "done")
    other = record(root, "done", budget="laptop")
    oelm("clean", "--all", "--budget", "smoke", "--yes")
    assert other.is_dir() and not (root / "GPT-02" / "smoke").exists()


@pytest.mark.parametrize("name", ["..", ".", "../GPT-02", "/", "GPT-02/smoke", "", "GPT-02\x00", "*"])
def test_clean_takes_no_name_that_is_not_a_runs(root: Path, name: str) -> None:
    run = record(root, "done")
    outside = record(root.parent, "done")
    assert "no runs of" in oelm("clean", "--yes", name, code=2).stderr
    assert run.is_dir() and outside.is_dir()


def test_clean_refuses_a_root_that_is_no_folder(root: Path) -> None:
    assert "is not there" in oelm("clean", "--all", code=3).stderr
    root.write_text("x")
    assert "is a file" in oelm("clean", "--all", code=3).stderr
