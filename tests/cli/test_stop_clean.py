"""`oelm stop` and `clean` as a user types them, from another terminal than that of the runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from oelm.runs.status import read_status
from tests.cli.watching import oelm
from tests.conftest import tiny_settings
from tests.experiments.recorded import record
from tests.faults.harness import start


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, with the default place for runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


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


def test_clean_deletes_the_pictures_that_inspect_wrote(root: Path) -> None:
    run = record(root, "done")
    for name in ("heads-step-30.png", "heads-step-30.svg"):
        (run / name).touch()
    assert "not written by oelm" not in oelm("clean", "GPT-02", "--yes").stdout and not run.exists()


@pytest.mark.parametrize("command", ["stop", "clean"])
def test_the_help_of_what_ends_or_deletes_runs_asks_for_names(command: str) -> None:
    shown = oelm(command, "--help").stdout
    assert "or give --all" in shown and "default: all" not in shown


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
