"""`oelm status` as a user types it: in pipes, on terminals, and from another terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.watching import PROGRAM, oelm, screen
from tests.experiments.recorded import record

HOSTILE = "\x1b[2Jcleared\r\nsecond line\x07\x9b2J"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, with the default place for runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def rows(run: Path, *values: dict[str, Any]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))


def test_no_runs_is_said_with_the_command_to_begin_with(root: Path) -> None:
    assert oelm("status").stdout == "No runs under outputs; begin with `oelm run GPT-02 --budget smoke`\n"


def test_only_folders_with_runs_are_called_experiments_that_have_some(root: Path) -> None:
    record(root, "done")
    (root / "bench").mkdir()
    assert "no runs of 'nope' under outputs; runs here: GPT-02\n" in oelm("status", "nope", code=2).stderr


def test_a_root_that_is_itself_a_run_is_called_so(root: Path) -> None:
    run = record(root, "done")
    assert oelm("status", "--out", run).stdout.startswith(f"{run} is itself a run: use `oelm compare RUN RUN` or `oelm eval")


def test_a_root_that_is_a_file_is_refused(root: Path) -> None:
    root.write_text("x")
    assert "is a file" in oelm("status", code=3).stderr


def test_the_table_shows_what_each_run_does_and_the_footer_counts(root: Path) -> None:
    record(root, "done", experiment="GPT-01", best=32.0, metric="ppl")
    record(root, "done", best=33.6, metric="ppl", step_s=0.0123, device="cuda:1")
    record(root, "running", seed=1, eta_s=3725.0, host="elsewhere", best=50.0, metric="ppl")
    record(root, "running", seed=2)
    record(root, "queued", experiment="SST-2-02", best=0.915, metric="accuracy")
    lines = oelm("status").stdout.splitlines()
    assert lines[0].split() == "experiment budget variant seed state step best gap ETA loss s/step device".split()
    assert lines[2].split() == "GPT-02 smoke default 0 done 600/600 PPL 33.60 +5.0% 3.250 0.0123 cuda:1".split()
    assert lines[3].split() == "GPT-02 smoke default 1 running 450/600 PPL 50.00 1:02:05 3.250 0.01 cpu".split()
    assert lines[5].split()[4:7] == ["queued", "0/600", "91.50%"]
    assert lines[7] == "5 runs: 1 running, 1 queued, 1 dead, 2 done"
    assert lines[8].startswith("dead: killed; rerun the command that started them")


def test_a_done_run_whose_config_is_damaged_is_marked(root: Path) -> None:
    record(root, "done", seed=1)
    (record(root, "done") / "config.json").write_text('{"method": {"in')
    damaged, whole = oelm("status").stdout.splitlines()[1:3]
    assert "done, config unreadable  600/600" in damaged and "unreadable" not in whole


def test_accuracies_have_the_largest_class_below_them(root: Path) -> None:
    run = record(root, "done", experiment="SST-2-01", best=0.9, metric="accuracy")
    assert "largest class" not in oelm("status").stdout
    (run / "timing_stats.json").write_text(json.dumps({"majority_accuracy": 0.509}))
    record(root, "done", best=33.6, metric="ppl")
    assert "\nalways naming the largest class: 50.90%\n" in oelm("status").stdout


def test_ids_groups_and_budgets_choose(root: Path) -> None:
    for experiment in ("GPT-01", "GPT-02", "SST-2-01"):
        record(root, "done", experiment=experiment)
    record(root, "done", budget="laptop")

    def shown(*arguments: str) -> list[str]:
        lines = oelm("status", *arguments).stdout.splitlines()
        return [" ".join(line.split()[:2]) for line in lines[1 : lines.index("")]]

    assert shown("gpt-02") == ["GPT-02 laptop", "GPT-02 smoke"]
    assert shown("gpt", "--budget", "smoke") == ["GPT-01 smoke", "GPT-02 smoke"]
    assert "No runs of GPT-01 at laptop" in oelm("status", "GPT-01", "--budget", "laptop").stdout


def test_an_unknown_id_is_refused_with_the_nearest(root: Path) -> None:
    record(root, "done")
    for name in ("status", "stop", "clean"):
        assert "did you mean 'GPT-02'?" in oelm(name, "GPT-2", code=2).stderr


def test_a_running_arm_is_compared_with_its_baseline_at_the_same_step(root: Path) -> None:
    rows(record(root, "done", experiment="GPT-01", best=10.0, metric="ppl"), {"step": 100, "val_loss": 3.0, "val_ppl": 20.0})
    rows(record(root, "running", host="elsewhere", best=22.0, metric="ppl"), {"step": 100, "val_loss": 3.1, "val_ppl": 22.0})
    assert "+10.0%" in oelm("status", "GPT-02").stdout


def test_a_run_without_a_readable_status_is_called_damaged(root: Path) -> None:
    (record(root, "failed") / "status.json").write_text("{")
    assert oelm("status").stdout.splitlines()[1].split() == "GPT-02 smoke default 0 damaged".split()


def test_five_failures_are_told_a_line_each_and_the_rest_counted(root: Path) -> None:
    for seed in range(7):
        record(root, "failed", seed=seed, message=f"OutOfMemoryError: too big\nby {seed}")
    told = [line for line in oelm("status").stdout.splitlines() if line.startswith("failed: ")]
    assert told[1] == "failed: GPT-02/smoke/default/seed-1: OutOfMemoryError: too big by 1"
    assert len(told) == 6 and "and 2 more" in told[5]


@pytest.mark.parametrize(
    ("said", "step", "own", "shown"),
    [
        ("failed", 0, "begun\n", "console.log"),
        ("failed", 0, None, "console.log"),
        ("failed", 9, "begun\n", "training.log"),
        ("stopped", 9, "", "console.log"),
        ("stopped", 9, "begun\n", "training.log"),
    ],
)
def test_status_names_the_log_that_says_most(root: Path, said: Any, step: int, own: str | None, shown: str) -> None:
    run = record(root, said, step=step)
    (run / "console.log").write_text("printed\n")
    if own is not None:
        (run / "training.log").write_text(own)
    assert f"log: {(run / shown).relative_to(root.parent)}" in oelm("status").stdout


def test_logs_of_running_runs_can_be_followed_by_pasting(root: Path) -> None:
    for seed in range(3):
        run = record(root, "running" if seed else "done", seed=seed, host="elsewhere")
        (run / "training.log").write_text("begun\n")
    shown = [line for line in oelm("status").stdout.splitlines() if line.startswith("log: ")]
    assert shown == [f"log: tail -f outputs/GPT-02/smoke/default/seed-{seed}/training.log" for seed in (1, 2)]


def test_text_of_a_run_cannot_drive_the_terminal(root: Path) -> None:
    run = record(root, "failed", message=HOSTILE, device=HOSTILE, host=HOSTILE)
    (run / "training.log").write_text(HOSTILE)
    assert not {"\x1b", "\x07", "\r", "\x9b"} & set(oelm("status").output)
    record(root, "running", host=HOSTILE)
    assert "\x1b" not in oelm("stop", "--all").output


def test_a_run_that_diverged_keeps_the_table_narrow(root: Path) -> None:
    record(root, "done", experiment="GPT-01", best=1.0, metric="ppl")
    record(root, "running", host="elsewhere", loss=1e250, best=1e300, metric="ppl", eta_s=1e300)
    assert max(map(len, oelm("status").stdout.splitlines())) < 120


def test_a_pipe_that_knows_no_unicode_still_gets_the_table(root: Path) -> None:
    record(root, "done", device="\u03bc-chip")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-c", PROGRAM, "status"], env=environment, capture_output=True)
    assert shown.returncode == 0 and b"GPT-02" in shown.stdout


def test_a_broken_catalog_of_the_users_own_hides_no_run(root: Path) -> None:
    record(root, "done")
    (root.parent / "experiments.yaml").write_text("GPT-02: [")
    result = oelm("status")
    assert "1 run: 1 done" in result.stdout and "experiments.yaml" in result.stderr


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with more runs than a terminal is given lines."""
    folder = tmp_path_factory.mktemp("many")
    for seed in range(110):
        record(folder / "outputs", "done", seed=seed)
        record(folder / "outputs", "queued", experiment="GPT-03", seed=seed)
    record(folder / "outputs", "running", experiment="GPT-05", host="elsewhere")
    return folder


def test_a_terminal_is_given_the_active_runs_and_a_summary_of_many(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(many)
    with screen("status") as terminal:
        assert terminal.end() == 0
    assert terminal.shown.count("GPT-02") == 1 and "110 done" in terminal.shown and "110 queued" in terminal.shown
    assert "450/600" in terminal.shown and "221 runs: 1 running, 110 queued, 110 done" in terminal.shown


def test_all_and_pipes_are_given_every_run(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(many)
    assert oelm("status").stdout.count("GPT-02") == 110
    with screen("status", "--all") as terminal:
        assert terminal.end() == 0
    assert terminal.shown.count("GPT-02") == 110


def test_lines_are_cut_at_the_width_of_the_terminal(root: Path) -> None:
    record(root, "failed", variant="v" * 64, message="m" * 500)
    with screen("status", columns=60) as terminal:
        assert terminal.end() == 0
    assert "\u2026" in terminal.shown and "m" * 60 not in terminal.shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", terminal.shown)
    assert max(map(len, plain.splitlines())) <= 60
    assert set("experiment budget variant seed state step best gap ETA loss s/step device".split()) <= set(plain.split())


def test_watching_shows_runs_that_appear_and_vanish_until_an_interrupt(root: Path) -> None:
    with screen("status", "--watch") as terminal:
        place = terminal.wait_for("No runs under outputs")
        run = record(root, "running", host="elsewhere")
        place = terminal.wait_for("450/600", after=place)
        for name in ("config.json", "status.json"):
            (run / name).unlink()
        place = terminal.wait_for("No runs under outputs", after=place)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
    assert "Traceback" not in terminal.shown


def test_watching_in_a_pipe_goes_on_until_an_interrupt(root: Path) -> None:
    record(root, "done")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "status", "GPT-02", "GPT-99", "--watch"], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    counted = 0
    for line in process.stdout:
        counted += line.startswith("1 run: 1 done")
        if counted == 2:
            process.send_signal(signal.SIGINT)
            break
    process.communicate(timeout=60)
    assert process.returncode == 0
